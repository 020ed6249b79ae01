"""Resizes, transforms and recolors images with the same results on all backends."""

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
    """Resizes images with the same result on all backends, by one matrix product for each axis.

    Matrix products are used only for bicubic resizing, and for bilinear resizing of float64 images. In all other cases,
    this function calls `original`, the function of the backend.

    Bicubic resizing uses the kernel of jax, with the coefficient -0.5. torch (2.13) uses the coefficient -0.75, so its
    values differ by a tenth. TensorFlow reads its kernel from a table, with errors of 1e-4.

    Bilinear resizing of float64 images is computed in float64. TensorFlow would compute it in float32.
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
        if known is None:  # after RandomCrop in a graph of TensorFlow
            known, make = ops.shape(images)[axis], _interpolation.__wrapped__
        matrix = make(known, int(length), interpolation == "bicubic", antialias)
        matrix = ops.convert_to_tensor(matrix, dtype=images.dtype)  # else NumPy's float64 becomes float32
        images = ops.moveaxis(ops.tensordot(images, matrix, [[axis], [1]]), -1, axis)
    return images


def _of_ratio(images: Any, size: tuple[int, int], axes: tuple[int, int], fill_value: float | None) -> Any:
    """Crops images around their center to the aspect ratio of `size`. With `fill_value`, pads them to this ratio."""
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
    """Returns the matrix of shape `(wanted, known)` that resizes one axis from `known` to `wanted` pixels.

    Each row belongs to one output pixel, and holds the weights of the input pixels. A weight depends on the distance
    between the centers of the input pixel and the output pixel.
    """
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
    """Applies an affine transform to images, with the same result on all backends.

    This function transforms only float64 images, and images with `fill_mode="wrap"`. In all other cases, it calls
    `original`. TensorFlow (2.21) reads the matrix in float32, which shifts positions by 1e-7 of the image. TensorFlow's
    "wrap" leaves out the positions between the last pixel and the first pixel.

    Args:
        original: the backend's function.
        images: a batch of images, with four axes.
        transform: a tensor of shape `(images, 8)`: for each image, the first eight entries of a 3 x 3 matrix. The last
            entry of the matrix is 1. The matrix maps each output pixel to a position in the input.
        interpolation: see `keras.ops.image.affine_transform`, also for the remaining arguments.
    """
    if not (is_float64(images) or fill_mode == "wrap") or not _is_batch(images):
        return original(images, transform, interpolation, fill_mode, fill_value, data_format)
    return _moved(images, transform, None, interpolation, fill_mode, fill_value, data_format)


def perspective(
    original: Callable[..., Any], images: Any, start_points: Any, end_points: Any, interpolation: str = "bilinear",
    fill_value: float = 0, data_format: str | None = None,
) -> Any:  # fmt: skip
    """Applies a perspective transform to images. For float64 images, all backends compute in float64, as torch does.

    All other images go to `original`. Keras (3.15.1) reads the points in float32 on TensorFlow and jax. The matrix
    comes from the private `keras.src.backend.image.compute_homography_matrix`, which every backend has.
    """
    if not is_float64(images) or not _is_batch(images) or len(start_points.shape) != 3:
        return original(images, start_points, end_points, interpolation, fill_value, data_format)
    transform = backend.image.compute_homography_matrix(
        *(ops.cast(one, "float64") for one in (start_points, end_points))
    )
    nearer = transform[:, 6:]
    return _moved(images, transform, nearer, interpolation, "constant", fill_value, data_format)


def is_float64(tensor: Any) -> bool:
    """Returns whether a tensor or an array has the dtype float64."""
    return keras.backend.standardize_dtype(ops.convert_to_tensor(tensor).dtype) == "float64"


def _is_batch(images: Any) -> bool:
    return len(images.shape) == 4 and None not in images.shape[1:]


def _moved(
    images: Any, transform: Any, nearer: Any, interpolation: str, fill_mode: str, fill_value: float,
    data_format: str | None,
) -> Any:  # fmt: skip
    """Samples images at the positions to which a 3 x 3 matrix maps each output pixel.

    The first six entries of the matrix are in `transform`. The last entry is 1.

    Args:
        nearer: a tensor of shape `(images, 2)` with entries 7 and 8 of the matrix, for a perspective. None: both
            entries are 0.
    """
    images, is_wide = ops.convert_to_tensor(images), is_float64(images)
    wide = "float64" if is_wide else "float32"  # not `result_type`, which may turn float64 into float32
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
    """Returns interpolated pixels, channels last, at the positions `y` and `x`.

    `y` and `x` have the shape `(images, height, width)`.
    """
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
    """Returns the neighboring pixels on one axis from which each position is interpolated.

    Returns:
        A tuple of three tensors for each neighbor. The first tensor holds the index of the neighbor, after `fill_mode`
        moved the index into the image. The second tensor says whether the index was inside before. The third tensor
        holds the weight of the neighbor. Each tensor has one value for each position.
    """
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
    """Raises a clear error if jax compiles a RandomElasticTransform; otherwise calls `original`.

    The layer's kernel has a random size, and XLA compiles only fixed sizes. Without this function, Keras (3.15.1)
    raises an AttributeError in a compiled step.
    """
    try:
        int(sigma)
    except Exception as error:
        raise UserError(
            "RandomElasticTransform: jax cannot compile this layer, because the size of its kernel is random; apply "
            "the layer to the data (with tf.data.Dataset.map), or train with torch or tensorflow"
        ) from error
    return original(images, alpha, sigma, **choices)


def hue_in_its_own_type(original: Callable[..., Any], layer: Any, images: Any, *ranges: Any) -> Any:
    """Makes `RandomHue` scale images in float64 if the layer computes in float64.

    Keras (3.15) always scales in float32.
    """
    return original(layer, images, *ranges, dtype="float64" if layer.compute_dtype == "float64" else "float32")


def brightness_of_a_copy(original: Callable[..., Any], layer: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
    """Keeps `RandomBrightness` from changing its input tensor.

    Keras (3.15.1) adds to the images in place (`images += rgb_delta`). On torch, this also changes the images that
    other layers get.
    """
    return original(layer, ops.copy(images), *args, **kwargs)
