"""IDX files: whole ones are read, damaged ones are named."""

import gzip
import struct

import numpy as np
import pytest

from kerasdp.data import idx
from kerasdp.errors import UserError


def encode(array, code=0x08):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype="uint8").reshape(2, 3, 4)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read(tmp_path, suffix):
    path = tmp_path / f"images{suffix}"
    path.write_bytes(gzip.compress(encode(IMAGES)) if suffix else encode(IMAGES))
    np.testing.assert_array_equal(idx.read(str(path)), IMAGES)


def test_numbers_of_several_bytes_are_big_endian(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(encode(np.array([1, 258], dtype=">i4"), 0x0C))
    assert idx.read(str(path)).tolist() == [1, 258]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        b"not an idx file",
        encode(IMAGES)[:-1],
        encode(IMAGES) + b"x",
        encode(IMAGES)[:10],
        b"\0\0\x07\x01\0\0\0\x01x",
    ],
)
def test_damaged_files_are_named(tmp_path, content):
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(UserError, match="images: expected"):
        idx.read(str(path))


@pytest.mark.parametrize("keep", [5, 30])
def test_truncated_gzip(tmp_path, keep):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(encode(np.random.RandomState(0).randint(0, 255, 4000).astype("uint8")))[:keep])
    with pytest.raises(UserError, match="cannot be read"):
        idx.read(str(path))


def test_corrupt_gzip(tmp_path):
    content = bytearray(gzip.compress(encode(IMAGES)))
    content[15] ^= 0xFF
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"images.gz"):
        idx.read(str(path))


def test_split(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(encode(IMAGES))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(encode(np.array([1, 2], "uint8"))))
    images, labels = idx.read_split(str(tmp_path), "train")
    assert images.shape == (2, 3, 4, 1)
    assert labels.tolist() == [1, 2]
    with pytest.raises(UserError, match="expected t10k-images-idx3-ubyte"):
        idx.read_split(str(tmp_path), "t10k")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(encode(np.array([1], "uint8"))))
    with pytest.raises(UserError, match="2 train images but 1 labels"):
        idx.read_split(str(tmp_path), "train")
