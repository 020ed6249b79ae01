"""Writes a data set of images as a folder of shards, for `recipes/sharded.py`: a pattern for your own.

    python recipes/make_shards.py shards                                       # the digits, as Parquet
    python recipes/make_shards.py shards --format=array_record --num_shards=8
    python recipes/make_shards.py shards --dataset=fashion_mnist

Expected of the first: six files, of `train` and of `test`, in seconds. Parquet is written by Hugging Face's `datasets`,
ArrayRecord by the library that comes with `grain`: pip install 'kerasdp[data]'.
"""

import argparse
import io
import os
from collections.abc import Iterator
from typing import Any

import kerasdp


def write(dataset: str, folder: str, kind: str, num_shards: int) -> None:
    """Writes both splits."""
    data = kerasdp.load_data(dataset)
    os.makedirs(folder, exist_ok=True)
    for split, source in (("train", data.train), ("test", data.test)):
        for shard in range(num_shards):
            path = os.path.join(folder, f"{split}-{shard:05d}-of-{num_shards:05d}.{kind}")
            numbers = range(shard * source.num_samples // num_shards, (shard + 1) * source.num_samples // num_shards)
            (write_parquet if kind == "parquet" else write_array_record)(path, samples(source, numbers))


def samples(source: Any, numbers: range) -> Iterator[tuple[bytes, int]]:
    """Yields the image, as PNG, and the class of each sample."""
    import numpy as np
    from PIL import Image

    for number in numbers:
        (pixels,), ((label,), _) = source.inputs(np.array([number])), source.targets(np.array([number]))
        file = io.BytesIO()
        Image.fromarray(pixels.squeeze()).save(file, "PNG")
        yield file.getvalue(), int(label)


def write_parquet(path: str, pairs: Iterator[tuple[bytes, int]]) -> None:
    """A table with a column of PNGs and one of classes."""
    import datasets

    images, labels = zip(*pairs)
    datasets.Dataset.from_dict({"image": images, "label": labels}).to_parquet(path)


def write_array_record(path: str, pairs: Iterator[tuple[bytes, int]]) -> None:
    """Records of a byte for the class, and the PNG."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(path, "group_size:1")  # any other size is read slowly in a random order
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
