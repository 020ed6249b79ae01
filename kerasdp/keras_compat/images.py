"""Images that are resized, moved, and changed in color alike on all backends."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend

from kerasdp.errors import UserError


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
    crops, pads = choices.get("crop_to_aspect_ratio"), choices.get("pad_to_aspect_ratio")
    is_usual = not (crops and pads) and not ((crops or pads) and None in [images.shape[axis] for axis in axes])
    if not (is_usual and is_other):
        return original(images, size, interpolation, antialias, **choices)
    if not keras.backend.is_float_dtype(kind):
        resized = resize(original, ops.cast(images, "float32"), size, interpolation, antialias, **choices)
        return ops.saturate_cast(ops.round(resized), kind)
    if crops or pads:
        images = _of_ratio(images, size, axes, choices.get("fill_value", 0.0) if pads else None)
    for axis, length in zip(axes, size):
        known = images.shape[axis]
        make: Callable[..., Any] = _interpolation
        if known is None:  # what RandomCrop cuts out in a graph of TensorFlow's
            known, make = ops.shape(images)[axis], _interpolation.__wrapped__
        matrix = make(known, int(length), interpolation == "bicubic", antialias)
        matrix = ops.convert_to_tensor(matrix, dtype=images.dtype)  # with a type: others of NumPy become float32
        images = ops.moveaxis(ops.tensordot(images, matrix, [[axis], [1]]), -1, axis)
    return images


def _of_ratio(images: Any, size: tuple[int, int], axes: tuple[int, int], fill_value: float | None) -> Any:
    """Returns the middle of images that has the ratio of `size`; with `fill_value` they are padded to have it."""
    lengths = [images.shape[axis] for axis in axes]
    for axis, length, other, wanted, by in zip(axes, lengths, lengths[::-1], size, size[::-1]):
        right = int(other * wanted / by)
        if fill_value is not None and (more := max(right - length, 0) // 2):
            widths = [(0, 0)] * len(images.shape)
            widths[axis] = (more, more)
            images = ops.pad(images, widths, constant_values=fill_value)
        elif fill_value is None and right < length:
            first = (length - max(right, 1)) // 2
            images = images[(..., slice(first, first + max(right, 1)), *[slice(None)] * (-axis - 1))]
    return images


@functools.lru_cache(64)
def _interpolation(known: Any, wanted: int, is_cubic: bool, antialias: bool) -> Any:
    """Returns the shares of known numbers in each wanted one, `(wanted, known)`, by pixels' centres."""
    of = np if isinstance(known, int) else ops
    numbers = of.arange(known, dtype="float64")
    known = known if of is np else ops.cast(known, "float64")
    places = (of.arange(wanted, dtype="float64") + 0.5) * known / wanted - 0.5
    apart = of.abs(places[:, None] - numbers)
    apart = apart / of.maximum(known / wanted, 1) if antialias else apart
    shares = of.maximum(1 - apart, 0)
    if is_cubic:
        near, far = (1.5 * apart - 2.5) * apart**2 + 1, ((2.5 - 0.5 * apart) * apart - 4) * apart + 2
        shares = of.where(apart < 1, near, of.where(apart < 2, far, 0))
    return shares / of.sum(shares, axis=1, keepdims=True)


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
    if not (is_float64(images) or fill_mode == "wrap") or not _is_batch(images):
        return original(images, transform, interpolation, fill_mode, fill_value, data_format)
    return _moved(images, transform, None, interpolation, fill_mode, fill_value, data_format)


def perspective(
    original: Callable[..., Any], images: Any, start_points: Any, end_points: Any, interpolation: str = "bilinear",
    fill_value: float = 0, data_format: str | None = None,
) -> Any:  # fmt: skip
    """Returns a `perspective_transform` of float64 in float64, as on torch.

    Keras (3.15.1) takes the points in float32 on TensorFlow and jax. Its function that makes a matrix of them, on each
    backend `keras.src.backend.image.compute_homography_matrix`, is in no public module.
    """
    if not is_float64(images) or not _is_batch(images) or len(start_points.shape) != 3:
        return original(images, start_points, end_points, interpolation, fill_value, data_format)
    transform = backend.image.compute_homography_matrix(
        *(ops.cast(one, "float64") for one in (start_points, end_points))
    )
    nearer = transform[:, 6:]
    return _moved(images, transform, nearer, interpolation, "constant", fill_value, data_format)


def is_float64(tensor: Any) -> bool:
    """Returns whether a tensor or an array is in float64."""
    return keras.backend.standardize_dtype(ops.convert_to_tensor(tensor).dtype) == "float64"


def _is_batch(images: Any) -> bool:
    return len(images.shape) == 4 and None not in images.shape[1:]


def _moved(
    images: Any, transform: Any, nearer: Any, interpolation: str, fill_mode: str, fill_value: float,
    data_format: str | None,
) -> Any:  # fmt: skip
    """Returns images whose pixels come from the places that a matrix of 3 x 3 numbers says, the last of which is 1.

    Args:
        nearer: `(images, 2)`, the two numbers before the last; None: zeros.
    """
    images, is_wide = ops.convert_to_tensor(images), is_float64(images)
    wide = "float64" if is_wide else "float32"  # by hand: `result_type` gives float32 where floats are to be narrow
    is_first = (data_format or keras.config.image_data_format()) == "channels_first"
    images = ops.transpose(images, (0, 2, 3, 1)) if is_first else images
    height, width = images.shape[1:3]
    numbers = ops.cast(transform, wide)[:, :, None, None]
    y, x = ops.arange(height, dtype=wide)[:, None], ops.arange(width, dtype=wide)[None]
    in_y, in_x = (numbers[:, row] * x + numbers[:, row + 1] * y + numbers[:, row + 2] for row in (3, 0))
    if nearer is not None:
        below = nearer[:, :1, None] * x + nearer[:, 1:, None] * y + 1
        in_y, in_x = in_y / below, in_x / below
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


def elastic_outside_of_a_program(
    original: Callable[..., Any], images: Any, alpha: Any = 20.0, sigma: Any = 5.0, **choices: Any
) -> Any:
    """Refuses a RandomElasticTransform in a step of jax, where Keras (3.15.1) ends in an AttributeError of its own.

    The size of its kernel is a random number, which a program that XLA compiles cannot have.
    """
    try:
        int(sigma)
    except Exception as error:
        raise UserError(
            "RandomElasticTransform: jax cannot compile a step with this layer, since its random numbers are sizes. "
            "Apply the layer in the data (tf.data's map), or train with torch or tensorflow"
        ) from error
    return original(images, alpha, sigma, **choices)


def hue_in_its_own_type(original: Callable[..., Any], layer: Any, images: Any, *ranges: Any) -> Any:
    """Moves the range of images in float64 where the layer computes in it, which `RandomHue` (3.15) does in float32."""
    return original(layer, images, *ranges, dtype="float64" if layer.compute_dtype == "float64" else "float32")


def brightness_of_a_copy(original: Callable[..., Any], layer: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what `RandomBrightness` makes of images, and leaves these as they are.

    Keras (3.15.1) adds to them in place (`images += rgb_delta`), which on torch changes what other layers are given.
    """
    return original(layer, ops.copy(images), *args, **kwargs)
