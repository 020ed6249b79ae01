"""Functions of Keras that TensorFlow computes in float32, whatever it is given, in the type of the images."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops


def affine(
    original: Callable[..., Any], images: Any, transform: Any, interpolation: str = "bilinear",
    fill_mode: str = "constant", fill_value: float = 0, data_format: str | None = None,
) -> Any:  # fmt: skip
    """Returns an `affine_transform` of float64 in float64, and with `fill_mode="wrap"` as on torch and jax.

    TensorFlow (2.21) takes the matrix in float32, with which places are 1e-7 of an image off. Its "wrap" leaves out the
    pixels between the last one and the first.
    """
    images, transform = ops.convert_to_tensor(images), ops.convert_to_tensor(transform)
    # By hand: `result_type` gives float32 where floats are to be narrow.
    wide = "float64" if keras.backend.standardize_dtype(images.dtype) == "float64" else "float32"
    is_other = wide == "float64" or fill_mode == "wrap"
    if not is_other or len(images.shape) != 4 or None in images.shape[1:]:
        return original(images, transform, interpolation, fill_mode, fill_value, data_format)
    is_first = (data_format or keras.config.image_data_format()) == "channels_first"
    images = ops.transpose(images, (0, 2, 3, 1)) if is_first else images
    height, width = images.shape[1:3]
    numbers = ops.cast(transform, wide)[:, :, None, None]
    y, x = ops.arange(height, dtype=wide)[:, None], ops.arange(width, dtype=wide)[None]
    in_y, in_x = (numbers[:, row] * x + numbers[:, row + 1] * y + numbers[:, row + 2] for row in (3, 0))
    moved = ops.cast(_taken(images, in_y, in_x, interpolation, fill_mode, fill_value), images.dtype)
    return ops.transpose(moved, (0, 3, 1, 2)) if is_first else moved


def _taken(images: Any, y: Any, x: Any, interpolation: str, fill_mode: str, fill_value: float) -> Any:
    """Returns the pixels at places of shape `(images, height, width)`, channels last."""
    height, width, channels = images.shape[1:]
    rows = ops.reshape(images, (-1, channels))
    first = ops.cast(ops.arange(ops.shape(images)[0]), "int32")[:, None, None] * (height * width)
    total: Any = 0
    for (row, in_y, share), (column, in_x, other) in itertools.product(
        _neighbours(y, height, interpolation, fill_mode), _neighbours(x, width, interpolation, fill_mode)
    ):
        pixels = ops.take(rows, first + row * width + column, axis=0)
        if fill_mode == "constant":
            pixels = ops.where(ops.logical_and(in_y, in_x)[..., None], pixels, ops.cast(fill_value, pixels.dtype))
        total += ops.cast(share * other, pixels.dtype)[..., None] * pixels
    return total


def _neighbours(place: Any, size: int, interpolation: str, fill_mode: str) -> list[tuple[Any, Any, Any]]:
    """Returns indices of pixels by a place on an axis, whether these are in the image, and their shares."""
    if interpolation == "nearest":
        found = [(ops.sign(place) * ops.floor(ops.abs(place) + 0.5), ops.ones_like(place))]
    else:
        below = ops.floor(place)
        found = [(below, 1 - (place - below)), (below + 1, place - below)]
    neighbours = []
    for index, share in found:
        index = ops.cast(index, "int32")
        if fill_mode == "wrap":
            inside = ops.mod(index, size)
        elif fill_mode == "reflect":
            inside = ops.mod(index, 2 * size)
            inside = ops.minimum(inside, 2 * size - 1 - inside)
        else:
            inside = ops.clip(index, 0, size - 1)
        neighbours.append((inside, ops.equal(inside, index), share))
    return neighbours
