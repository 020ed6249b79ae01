"""Trains an image classifier on Parquet or ArrayRecord files of any size.

    python recipes/make_shards.py shards                                     # writes the digits to such a folder
    python recipes/sharded.py --data_dir=shards
    python recipes/sharded.py --data_dir=shards --backend=jax --gpus=4 --workdir=runs/shards
    python recipes/sharded.py --data_dir=shards --workdir=runs/shards --resume     # skips samples without reading them

Expected of the second command: validation accuracy at least 0.96 on held-out digits, in less than two minutes on two
CPU cores.

Each process reads only the samples of its rows, by their index. `datasets` reads Parquet, mapped into memory. `grain`
reads ArrayRecord. Both: pip install 'kerasdp[data]'. Threads decode the images.

Copy this file into your project and edit it. For your files change `open_shards` and `pixels`.
"""

import glob
import io
import os
from typing import Any

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 64, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("epochs", 20, "Passes over the training data.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.03, "Learning rate.")
flags.DEFINE_string("data_dir", None, "Folder with the files train-* and test-*.")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def train(runner: "kerasdp.Runner") -> None:
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""
    import keras

    with runner.scope():
        model = kerasdp.build_model("lenet", input_shape=(28, 28, 1), num_classes=10)
        model.compile(
            optimizer=keras.optimizers.SGD(FLAGS.learning_rate, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    train_data, test_data = (open_shards(FLAGS.data_dir, split) for split in ("train", "test"))
    model.fit(train_data, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs, validation_data=test_data)


def open_shards(folder: str | None, split: str) -> "kerasdp.RecordSource":
    """Opens all files of a split as one list of records, in the order of the file names."""
    paths = sorted(glob.glob(os.path.join(folder or "", f"{split}-*")))
    if folder is None or not paths:
        raise kerasdp.UserError(f"--data_dir: expected a folder with files {split}-*. Received: {folder!r}")
    if paths[0].endswith(".parquet"):
        import datasets

        datasets.disable_progress_bars()
        # The first call copies the tables to an Arrow cache on disk. Each call maps the cache into memory.
        table = datasets.load_dataset("parquet", data_files=paths, split="train")
        return kerasdp.RecordSource(table, lambda row: (pixels(row["image"]), row["label"]))
    import grain

    records = grain.sources.ArrayRecordDataSource(paths)  # each: one byte for the class, then the image
    return kerasdp.RecordSource(records, lambda record: (pixels(record[1:]), record[0]))


def pixels(png: bytes) -> Any:
    """Decodes a PNG image to uint8, shape `(28, 28, 1)`. You can augment it here."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)))[..., None]


def main(argv):
    """Starts the training with the flags."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
