"""Functions that Keras (3.15) computes otherwise on torch than elsewhere, or in many more passes than PyTorch does."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend


def by_groups(original: Callable[..., Any], layer: Any, inputs: Any) -> Any:
    """Returns what a `GroupNormalization` gives, by PyTorch's own function.

    Keras has some ten passes over the inputs, of which Inductor (2.13) makes loops with strides: a small U-Net took
    1.3 times as long as the same net in PyTorch.
    """
    axis, kind = layer.axis % len(inputs.shape), keras.backend.result_type(inputs.dtype, "float32")
    if type(layer) is not keras.layers.GroupNormalization or axis == 0 or len(inputs.shape) < 3:
        return original(layer, inputs)
    gamma, beta = (
        None if weight is None else ops.cast(weight, kind)
        for weight in (layer.gamma if layer.scale else None, layer.beta if layer.center else None)
    )
    x = ops.moveaxis(ops.cast(inputs, kind), axis, 1)
    torch: Any = getattr(backend, "ops", backend).nn.torch  # of Keras 3.15 and 3.16
    # Not `torch.nn.functional.group_norm`, which refuses groups of one number.
    outputs = torch.group_norm(x, layer.groups, gamma, beta, layer.epsilon)
    return ops.cast(ops.cast(ops.moveaxis(outputs, 1, axis), inputs.dtype), layer.compute_dtype)


def without_padding(
    original: Callable[..., Any], inputs: Any, pool_size: Any, strides: Any = None, padding: str = "valid",
    data_format: str | None = None,
) -> Any:  # fmt: skip
    """Returns averages over windows, in which padding does not count.

    Where `"same"` pads more on one side than on the other, Keras repeats the numbers at the border, and counts them
    once more (3.15: of 0 to 15 in four rows, 3 x 3, in steps of 2, it gives 6.67 for 6.5).
    """
    inputs = ops.convert_to_tensor(inputs)
    rank = len(inputs.shape) - 2
    sizes, steps = (
        tuple(each) if isinstance(each, (tuple, list)) else (int(each),) * rank
        for each in (pool_size, pool_size if strides is None else strides)
    )
    is_last = (data_format or keras.config.image_data_format()) == "channels_last"
    lengths = tuple(inputs.shape[1:-1] if is_last else inputs.shape[2:])
    if padding != "same" or None in lengths:
        return original(inputs, pool_size, strides, padding, data_format)
    begins = [(max(-(-n // step) * step - step + k - n, 0)) // 2 for n, k, step in zip(lengths, sizes, steps)]
    ends = [max((-(-n // step) - 1) * step + k - n, 0) - b for n, k, step, b in zip(lengths, sizes, steps, begins)]
    if begins == ends:
        return original(inputs, pool_size, strides, padding, data_format)
    widths = [(0, 0), *zip(begins, ends), (0, 0)] if is_last else [(0, 0), (0, 0), *zip(begins, ends)]
    averages = original(ops.pad(inputs, widths), pool_size, strides, "valid", data_format)
    shares = np.ones((1,) * (rank + 2))
    for axis, (n, k, step, begin) in enumerate(zip(lengths, sizes, steps, begins), 1 if is_last else 2):
        first = np.arange(-(-n // step)) * step - begin
        counts = np.minimum(first + k, n) - np.maximum(first, 0)
        shares = shares * (k / counts).reshape([-1 if each == axis else 1 for each in range(rank + 2)])
    return averages * ops.convert_to_tensor(shares, dtype=averages.dtype)


def mirrored(
    original: Callable[..., Any], x: Any, pad_width: Sequence[Sequence[int]], mode: str = "constant", **values: Any
) -> Any:
    """Returns an array with padding; with `"symmetric"` of its own numbers, mirrored at its border.

    There Keras repeats the number at the border, which is the same for a width of 1 alone. One width for all axes it
    takes for that of the last.
    """
    x = ops.convert_to_tensor(x)
    if len(pad_width) == 1:
        pad_width = [tuple(pad_width[0]) * (2 // len(pad_width[0]))] * len(x.shape)
    if mode != "symmetric":
        return original(x, pad_width, mode=mode, **values)
    for axis, (before, after) in enumerate(pad_width):
        if before or after:
            places = np.pad(np.arange(x.shape[axis]), (before, after), mode="symmetric")
            x = ops.take(x, ops.convert_to_tensor(places, "int32"), axis=axis)
    return x


def of_a_copy(original: Callable[..., Any], layer: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what `RandomBrightness` makes of images, and leaves these as they are.

    Keras (3.15.1) adds to them in place (`images += rgb_delta`), which on torch changes what other layers are given.
    """
    return original(layer, ops.copy(images), *args, **kwargs)
