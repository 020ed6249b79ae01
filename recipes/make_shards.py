"""Writes an image data set as Parquet or ArrayRecord files for recipes/sharded.py.

    python recipes/make_shards.py shards                                       # the digits, as Parquet
    python recipes/make_shards.py shards --format=array_record --num_shards=8
    python recipes/make_shards.py shards --dataset=fashion_mnist

Expected of the first command: six files in seconds, three with `train` and three with `test` in their names. Hugging
Face's `datasets` writes Parquet. A library that comes with `grain` writes ArrayRecord. Both: pip install
'kerasdp[data]'.

Copy this file into your project and edit it.
"""

import argparse
import io
import os
from collections.abc import Iterator
from typing import Any

import kerasdp


def write(dataset: str, folder: str, kind: str, num_shards: int) -> None:
    """Writes the training data and the test data."""
    data = kerasdp.load_data(dataset)
    os.makedirs(folder, exist_ok=True)
    for split, source in (("train", data.train), ("test", data.test)):
        for shard in range(num_shards):
            path = os.path.join(folder, f"{split}-{shard:05d}-of-{num_shards:05d}.{kind}")
            numbers = range(shard * source.num_samples // num_shards, (shard + 1) * source.num_samples // num_shards)
            (write_parquet if kind == "parquet" else write_array_record)(path, samples(source, numbers))


def samples(source: Any, numbers: range) -> Iterator[tuple[bytes, int]]:
    """Yields the PNG image and the class of each sample."""
    import numpy as np
    from PIL import Image

    for number in numbers:
        (pixels,), ((label,), _) = source.inputs(np.array([number])), source.targets(np.array([number]))
        file = io.BytesIO()
        Image.fromarray(pixels.squeeze()).save(file, "PNG")
        yield file.getvalue(), int(label)


def write_parquet(path: str, pairs: Iterator[tuple[bytes, int]]) -> None:
    """Writes a table with a column of PNG images and a column of classes."""
    import datasets

    images, labels = zip(*pairs)
    datasets.Dataset.from_dict({"image": images, "label": labels}).to_parquet(path)


def write_array_record(path: str, pairs: Iterator[tuple[bytes, int]]) -> None:
    """Writes a record for each sample: one byte for the class, then the PNG image."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(path, "group_size:1")  # other sizes are slow to read in random order
    for image, label in pairs:
        writer.write(bytes([label]) + image)
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--format", default="parquet", choices=("parquet", "array_record"))
    parser.add_argument("--num_shards", type=int, default=3)
    arguments = parser.parse_args()
    write(arguments.dataset, arguments.folder, arguments.format, arguments.num_shards)
