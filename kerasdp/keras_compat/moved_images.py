"""Images that are moved or seen from another side in their own type, where TensorFlow and Keras take float32."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from keras.src import backend


def affine(
    original: Callable[..., Any], images: Any, transform: Any, interpolation: str = "bilinear",
    fill_mode: str = "constant", fill_value: float = 0, data_format: str | None = None,
) -> Any:  # fmt: skip
    """Returns an `affine_transform` of float64 in float64, and with `fill_mode="wrap"` as on torch and jax.

    TensorFlow (2.21) takes the matrix in float32, with which places are 1e-7 of an image off. Its "wrap" leaves out the
    pixels between the last one and the first.
    """
    if not (_is_float64(images) or fill_mode == "wrap") or not _is_batch(images):
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
    if not _is_float64(images) or not _is_batch(images) or len(start_points.shape) != 3:
        return original(images, start_points, end_points, interpolation, fill_value, data_format)
    transform = backend.image.compute_homography_matrix(
        *(ops.cast(one, "float64") for one in (start_points, end_points))
    )
    nearer = transform[:, 6:]
    return _moved(images, transform, nearer, interpolation, "constant", fill_value, data_format)


def _is_float64(images: Any) -> bool:
    return keras.backend.standardize_dtype(ops.convert_to_tensor(images).dtype) == "float64"


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
    # By hand: `result_type` gives float32 where floats are to be narrow.
    wide = "float64" if _is_float64(images) else "float32"
    images = ops.convert_to_tensor(images)
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
