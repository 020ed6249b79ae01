"""IDX files: whole ones are read, damaged ones are named."""

import gzip
import struct

import numpy as np
import pytest

from kerasdp.data import datasets
from kerasdp.errors import UserError


def encode(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype="uint8").reshape(2, 3, 4)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        encode(IMAGES)[:-1],
        encode(IMAGES) + b"x",
        b"\0\0\x07\x01\0\0\0\x01x",
        b"\0\0\x08\x03" + 12 * b"\x80",  # 2^31 x 2^31 x 2^31
        b"\0\0\x08\xff" + 255 * b"\0\0\0\1" + b"x",  # 255 axes
        b"\0\0\x08\xff\0\0\0\1",
    ],
)
def test_damaged_files_are_named(tmp_path, content):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(UserError, match="images: cannot be read as an IDX file"):
        datasets.read_idx(str(path))


@pytest.mark.parametrize("place", [2, 15, 30])
@pytest.mark.parametrize("damage", ["ends", "differs"])
def test_a_damaged_gz(tmp_path, damage, place):
    content = gzip.compress(encode(np.random.RandomState(0).randint(0, 255, 4000).astype("uint8")))
    path = tmp_path / "images.gz"
    path.write_bytes(content[:place] + (bytes([content[place] ^ 0xFF]) + content[place + 1 :]) * (damage == "differs"))
    with pytest.raises(UserError, match="images.gz"):
        datasets.read_idx(str(path))


def test_split(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(encode(IMAGES))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(encode(np.array([1, 2], "uint8"))))
    images, labels = datasets.read_idx_split(str(tmp_path), "train")
    assert images.shape == (2, 3, 4, 1)
    assert labels.tolist() == [1, 2]
    with pytest.raises(UserError, match="expected t10k-images-idx3-ubyte"):
        datasets.read_idx_split(str(tmp_path), "t10k")
