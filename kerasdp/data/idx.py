"""Reads IDX files, the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist)."""

import gzip
import math
import os
import zlib
from typing import BinaryIO, cast

import numpy as np

from kerasdp.errors import UserError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


_MOST_AXES = 8  # images in colour have 4
_CHUNK = 2**24


def read(path: str) -> np.ndarray:
    """Reads one IDX file, plain or gzipped.

    Returns:
        The array, in this machine's byte order.

    Raises:
        UserError: if the file is truncated, damaged or no IDX file.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return _read(path, cast(BinaryIO, file))
    except (OSError, EOFError, MemoryError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error


def _read(path: str, file: BinaryIO) -> np.ndarray:
    start = file.read(4)
    num_axes = start[3] if len(start) == 4 else 0
    sizes = file.read(4 * num_axes)
    is_idx = 0 < num_axes <= _MOST_AXES and start[:2] == b"\0\0" and start[2] in _DTYPES
    if not is_idx or len(sizes) < 4 * num_axes:
        raise UserError(f"{path}: expected an IDX file, but it does not begin like one; fetch the file again")
    dtype = np.dtype(_DTYPES[start[2]])
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    expected = math.prod(shape) * dtype.itemsize
    content = _at_most(expected + 1, file)  # whatever else a .gz may grow to
    if len(content) != expected:
        header = 4 + len(sizes)
        received = "more" if len(content) > expected else str(header + len(content))
        raise UserError(
            f"{path}: expected {header + expected} bytes for shape {shape}. Received: {received}; fetch it again"
        )
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _at_most(count: int, file: BinaryIO) -> bytes:
    """Returns what is left of a file, up to a number of bytes; takes memory for what is there alone."""
    parts = []
    while count and (part := file.read(min(count, _CHUNK))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def find(folder: str, name: str) -> str | None:
    """Returns the path of `name` in the folder, plain or with `.gz`; None if it is not there."""
    for path in (os.path.join(folder, name), os.path.join(folder, name + ".gz")):
        if os.path.isfile(path):
            return path
    return None


def read_split(folder: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads images and labels of `"train"` or `"t10k"` from the four files of MNIST's naming.

    Returns:
        Images, uint8, shape `(samples, height, width, channels)`, and labels, shape `(samples,)`.

    Raises:
        UserError: if a file is missing or damaged, or the counts do not agree.
    """
    arrays = []
    for kinds in (("images-idx3-ubyte", "images-idx4-ubyte"), ("labels-idx1-ubyte",)):
        paths = [find(folder, f"{split}-{kind}") for kind in kinds]
        path = next((path for path in paths if path), None)
        if path is None:
            raise UserError(f"--data_dir: expected {split}-{kinds[0]} (or with .gz) in {folder!r}; it is not there")
        arrays.append(read(path))
    images, labels = arrays
    if len(images) != len(labels):
        raise UserError(f"--data_dir: {folder!r} holds {len(images)} {split} images but {len(labels)} labels")
    return images.reshape(images.shape if images.ndim == 4 else (*images.shape, 1)), labels
