"""Images that are resized, moved, and changed in color alike on all backends."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops


def resize(
    original: Callable[..., Any], images: Any, size: tuple[int, int], interpolation: str = "bilinear",
    antialias: bool = False, **choices: Any,
) -> Any:  # fmt: skip
    """Returns a `resize` that interpolates by a product with a matrix for each axis.

    Cubically, as jax does: torch (2.13) has another polynomial (-0.75 in place of -0.5, which moves numbers by a
    tenth), TensorFlow a table of it (1e-4). And linearly in float64, which TensorFlow does in float32.
    """
    images = ops.convert_to_tensor(images)
    kind = keras.backend.standardize_dtype(images.dtype)
    is_first = (choices.get("data_format") or keras.config.image_data_format()) == "channels_first"
    axes = (-2, -1) if is_first else (-3, -2)
    is_other = interpolation == "bicubic" or (interpolation == "bilinear" and kind == "float64")
    is_cut = choices.get("crop_to_aspect_ratio") or choices.get("pad_to_aspect_ratio")
    if is_cut or not is_other or None in [images.shape[axis] for axis in axes]:
        return original(images, size, interpolation, antialias, **choices)
    if not keras.backend.is_float_dtype(kind):
        resized = resize(original, ops.cast(images, "float32"), size, interpolation, antialias, **choices)
        return ops.saturate_cast(ops.round(resized), kind)
    for axis, length in zip(axes, size):
        matrix = _interpolation(images.shape[axis], int(length), interpolation == "bicubic", antialias)
        matrix = ops.convert_to_tensor(matrix, dtype=images.dtype)  # with a type: others of NumPy become float32
        images = ops.moveaxis(ops.tensordot(images, matrix, [[axis], [1]]), -1, axis)
    return images


@functools.lru_cache(64)
def _interpolation(known: int, wanted: int, is_cubic: bool, antialias: bool) -> Any:
    """Returns the shares of known numbers in each wanted one, `(wanted, known)`, by pixels' centres."""
    places = (np.arange(wanted) + 0.5) * known / wanted - 0.5
    apart = np.abs(places[:, None] - np.arange(known))
    apart = apart / max(known / wanted, 1) if antialias else apart
    shares = np.maximum(1 - apart, 0)
    if is_cubic:
        near, far = (1.5 * apart - 2.5) * apart**2 + 1, ((2.5 - 0.5 * apart) * apart - 4) * apart + 2
        shares = np.where(apart < 1, near, np.where(apart < 2, far, 0))
    return shares / shares.sum(axis=1, keepdims=True)


def affine(
    original: Callable[..., Any], images: Any, transform: Any, interpolation: str = "bilinear",
    fill_mode: str = "constant", fill_value: float = 0, data_format: str | None = None,
) -> Any:  # fmt: skip
    """Returns an `affine_transform` of float64 in float64, and with `fill_mode="wrap"` as on torch and jax.

    TensorFlow (2.21) takes the matrix in float32, with which places are 1e-7 of an image off. Its "wrap" leaves out the
    pixels between the last one and the first.

    Args:
        original: of the backend.
        images: four axes.
        transform: `(images, 8)`: a matrix of 3 x 3 numbers, which says where pixels come from, without the last, 1.
        interpolation: as in Keras, with all that follows.
    """
    images = ops.convert_to_tensor(images)
    is_wide = keras.backend.standardize_dtype(images.dtype) == "float64"
    if not (is_wide or fill_mode == "wrap") or len(images.shape) != 4 or None in images.shape[1:]:
        return original(images, transform, interpolation, fill_mode, fill_value, data_format)
    wide = "float64" if is_wide else "float32"  # by hand: `result_type` gives float32 where floats are to be narrow
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


def hue_in_its_own_type(original: Callable[..., Any], layer: Any, images: Any, *ranges: Any) -> Any:
    """Moves the range of images in float64 where the layer computes in it, which `RandomHue` (3.15) does in float32."""
    return original(layer, images, *ranges, dtype="float64" if layer.compute_dtype == "float64" else "float32")


def brightness_of_a_copy(original: Callable[..., Any], layer: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what `RandomBrightness` makes of images, and leaves these as they are.

    Keras (3.15.1) adds to them in place (`images += rgb_delta`), which on torch changes what other layers are given.
    """
    return original(layer, ops.copy(images), *args, **kwargs)
