"""Patches Keras functions whose results differ between backends, so that all backends compute the same.

The patched crossentropies depend only on the values of their arguments. They also need less memory than the
crossentropies of Keras.
"""

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend
from keras.src.backend.common.variables import AutocastScope

from kerasdp.errors import UserError
from kerasdp.keras_compat import images
from kerasdp.keras_compat.patches import in_place_of, replaced_in_each


def same_on_all_backends() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the current backend computes the same losses and gradients as the other backends.

    In Keras 3.15, the patched functions are in `keras.src.backend.nn` and `.numpy` (3.16: `keras.src.backend.ops.nn`).
    The public `keras.ops`, losses, metrics and layers call these functions. No public option changes these functions.
    Where backends already agree, a replacement returns the value of the original function.

    Raises:
        UserError: if this version of Keras has the functions in other modules.
    """
    others = _REPLACEMENTS.get(keras.backend.backend(), {}).items()
    is_3_16 = hasattr(backend, "ops")
    found: list[tuple[Any, str, Callable[..., Any]]] = [
        (_functions(module, name), name, other) for (module, name), other in others if not (is_3_16 and name in _GONE)
    ]
    found += [(keras.layers.RNN, "inner_loop", _inputs_first)]
    found += [(keras.callbacks.SwapEMAWeights, "on_predict_end", _swapped_back)]
    found += [(keras.layers.RandomHue, "_transform_value_range", images.hue_in_its_own_type)]
    if keras.backend.backend() == "torch":
        found += [(keras.layers.GroupNormalization, "call", _by_groups)]
        found += [(keras.layers.RandomBrightness, "transform_images", images.brightness_of_a_copy)]
    return replaced_in_each((owner, {name: in_place_of(getattr(owner, name), other)}) for owner, name, other in found)


def _swapped_back(original: Callable[..., Any], callback: Any, logs: Any = None) -> None:
    """Makes `SwapEMAWeights` restore the trained weights after a prediction with averaged weights.

    Keras 3.15 checks the opposite condition (`if not self._ema_weights_in_model`). So Keras does not restore the
    weights, and training continues from the averages.
    """
    original(callback, logs)
    if callback._ema_weights_in_model:
        callback.on_test_end(logs)


# Keras 3.16 has no such functions in its backends: `keras.ops.amax` calls the backend's `max`.
_GONE = ("amax", "amin")


def _functions(module: str, name: str) -> Any:
    """Returns the backend module in which Keras looks up a function.

    In Keras 3.15, modules such as `nn` and `numpy` are in `backend`. In Keras 3.16, these modules are in `backend.ops`
    (keras-team/keras #23642), and `backend.numpy` is the NumPy backend.

    Raises:
        UserError: if the backend does not have the function in this module.
    """
    found: Any = getattr(getattr(backend, "ops", backend), module, None)
    kind = keras.backend.backend()
    if not hasattr(found, name) or not found.__name__.startswith(f"keras.src.backend.{kind}."):
        raise UserError(
            f"expected Keras 3.15 or 3.16. Received: {keras.__version__}, without {kind}.{module}.{name}; install 3.15"
        )
    return found


def _zeros_where_all_is_masked(
    original: Callable[..., Any], query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None,
    scale: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Computes attention that returns zeros for a query whose keys are all masked.

    Keras has two code paths for attention. With dropout, Keras uses `keras.layers.Softmax`, which returns zeros for a
    fully masked query. (KerasHub (0.32) uses this path on TensorFlow only.) The other path returns the mean of all
    values for a fully masked query.

    On torch, Keras adds a large negative number to masked logits. For a fully masked query, the fused kernels of
    PyTorch (2.13) then compute wrong gradients. The kernels store the logarithm of the sum of exponentials, and
    rounding leaves only the large number in it. So this function does not mask such a query, and sets the output of the
    query to zeros.
    """
    # Keras on TensorFlow would compute a missing scale in float32.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    given = query, key, value
    compute = functools.partial(_by_heads if _is_by_heads(*given, options) else original, *given)
    if mask is None:
        return compute(bias=bias, mask=mask, scale=scale, **options)
    mask = ops.cast(mask, "bool")
    if options.pop("is_causal", False):
        mask = ops.logical_and(mask, _causal_mask(query, key))
    mask = ops.reshape(mask, (1,) * (4 - len(mask.shape)) + tuple(ops.shape(mask)))
    is_empty = ops.logical_not(ops.any(mask, axis=-1, keepdims=True))  # batch, heads, queries, 1
    outputs = compute(bias=bias, mask=ops.logical_or(mask, is_empty), scale=scale, **options)
    return ops.where(ops.transpose(is_empty, (0, 2, 1, 3)), ops.zeros_like(outputs), outputs)


def _causal_mask(query: Any, key: Any) -> Any:
    return ops.tril(ops.ones((query.shape[1], key.shape[1]), "bool"))


def _is_by_heads(query: Any, key: Any, value: Any, options: dict[str, Any]) -> bool:
    """Returns whether `_by_heads` computes the attention, instead of Keras.

    On jax, `_by_heads` is used for float64, because `jax.nn` (0.10) always computes the softmax in float32. On
    TensorFlow, it is used because einsum (2.21) takes twice as long as transposes and matrix products.
    """
    if keras.backend.backend() != "tensorflow":
        return keras.backend.backend() == "jax" and images.is_float64(query)
    is_plain = not (options.get("flash_attention") or options.get("attn_logits_soft_cap"))
    return is_plain and all(len(each.shape) == 4 and None not in each.shape[1:] for each in (query, key, value))


def _by_heads(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, scale: Any, is_causal: bool = False, **_: Any
) -> Any:
    """Computes attention with one matrix product for each sample and head.

    The softmax is computed in float32 or float64, never in half precision.
    """
    dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
    wide = keras.backend.result_type(dtype, "float32")
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (ops.repeat(tensor, groups, axis=2) for tensor in (key, value))
    if is_causal:
        mask = _causal_mask(query, key)
    query, value = (ops.transpose(ops.cast(tensor, dtype), (0, 2, 1, 3)) for tensor in (query, value))
    logits = ops.matmul(query, ops.transpose(ops.cast(key, dtype), (0, 2, 3, 1)))
    logits = ops.cast(logits, wide) * ops.cast(scale, wide)
    if bias is not None:
        logits += ops.cast(bias, wide)
    if mask is not None:
        logits = ops.where(mask, logits, -np.inf)
    outputs = ops.matmul(ops.cast(ops.softmax(logits, axis=-1), dtype), value)
    return ops.transpose(outputs, (0, 2, 1, 3))


def channels_last_by_strides(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Computes a convolution of channels-last inputs on torch without copying the inputs.

    Keras (3.15) copies the inputs into channels-first memory, and back before the convolution (keras-team/keras #23279,
    fixed later). In torch the two layouts differ only in their strides, so no copy is needed.
    """
    given = _signature(original).bind(*args, **options)
    inputs = ops.convert_to_tensor(given.arguments["inputs"])
    is_last = (given.arguments.get("data_format") or keras.config.image_data_format()) == "channels_last"
    kernel = ops.convert_to_tensor(given.arguments["kernel"])
    if kernel.shape[-1] == 1 and keras.backend.standardize_dtype(kernel.dtype) == "float64":
        # PyTorch (2.13) fails in the gradient of a float64 convolution with one filter (transposed: one channel) on the
        # CPU, "slow_conv2d: grad_weight must be contiguous", unless the kernel's memory is in PyTorch's order.
        kernel = kernel.movedim((-1, -2), (0, 1)).contiguous().movedim((0, 1), (-1, -2))
    given.arguments["kernel"] = kernel
    if is_last and inputs.dim() > 3:  # a tensor of three axes has one layout
        given.arguments |= {"inputs": inputs.movedim(-1, 1), "data_format": "channels_first"}
        return original(*given.args, **given.kwargs).movedim(1, -1)
    return original(*given.args, **given.kwargs)


_signature = functools.cache(inspect.signature)


def _absolute(original: Callable[..., Any], x: Any) -> Any:
    """Returns absolute values with a gradient of 0 at exactly 0; on jax (0.10) the gradient at 0 is 1.

    The gradient at 0 matters for an L1 penalty of a bias, because biases start at 0.
    """
    x = ops.convert_to_tensor(x)
    return ops.sign(x) * x if _is_float(x) else original(x)


def _is_float(x: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def _leaky_relu(_: Callable[..., Any], x: Any, negative_slope: float = 0.2) -> Any:
    """Computes a leaky ReLU with the slope `negative_slope` at exactly 0; on jax (0.10) the slope at 0 is 1.

    Exact zeros are common, for example in a convolution of a black border with a bias of 0. TensorFlow (2.21) rounds
    the slope to float32.
    """
    x = ops.convert_to_tensor(x)
    return ops.where(x > 0, x, negative_slope * x)


def _first_largest(original: Callable[..., Any], x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Returns the index of the first maximum with TensorFlow's `argmax`, for accuracy metrics.

    Keras (3.15) first changes the values so that -0.0 is less than 0.0. For this, Keras compares int32 values, and
    TensorFlow (2.21) has no GPU kernel for the comparison. So each step would copy the logits to the host.
    """
    if axis is None or keepdims:
        return original(x, axis=axis, keepdims=keepdims)
    return _functions("numpy", "argmax").tf.argmax(ops.convert_to_tensor(x), axis, "int32")


# For float64: TensorFlow (2.21) has float32 constants in these functions, or computes wholly in float32.


def _exact_gelu(original: Callable[..., Any], x: Any, approximate: bool = True) -> Any:
    x = ops.convert_to_tensor(x)
    if not images.is_float64(x):
        return original(x, approximate)
    if approximate:
        return 0.5 * x * (1 + ops.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + ops.erf(x / np.sqrt(2)))


def of_values(original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, **axis: Any) -> Any:
    """Computes a crossentropy from the values of `output` alone, on TensorFlow.

    Keras on TensorFlow checks whether `output` comes from a softmax or sigmoid. If so, Keras uses the logits before the
    softmax or sigmoid, even with `from_logits=True`. On other backends, Keras clips the probabilities, and clipped
    probabilities have a gradient of 0.
    """
    return original(target, ops.copy(output), from_logits=from_logits, **axis)


def sparse_of_values(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """Computes a sparse categorical crossentropy from the values of `output` alone, on TensorFlow.

    Keras on TensorFlow clips probabilities and then normalizes them. On other backends, Keras normalizes first. The
    gradients differ if the probability of the target class is clipped.
    """
    output = ops.copy(output)
    if from_logits or axis not in (-1, len(output.shape) - 1):  # Keras raises for such an axis
        return original(target, output, from_logits=from_logits, axis=axis)
    epsilon = keras.backend.epsilon()
    target = ops.cast(target, "int32")
    if len(target.shape) < len(output.shape):
        target = ops.expand_dims(target, -1)
    logs = ops.log(ops.clip(output / ops.sum(output, -1, keepdims=True), epsilon, 1 - epsilon))
    return -ops.squeeze(ops.take_along_axis(logs, target, axis=-1), -1)


def sparse_of_rows(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """Computes a sparse categorical crossentropy on torch, with one row for each pixel or token.

    Keras on torch moves the class axis to the second place. For probabilities, the gradient then fails (2.13, CPU:
    "grad_input must be contiguous"). Logits are copied into another memory order.
    """
    rank, shape = len(output.shape), tuple(output.shape[:-1])
    if rank < 3 or axis not in (-1, rank - 1) or tuple(target.shape) not in (shape, (*shape, 1)):
        return original(target, output, from_logits=from_logits, axis=axis)
    rows = ops.reshape(target, (-1,)), ops.reshape(output, (-1, output.shape[-1]))
    return ops.reshape(original(*rows, from_logits=from_logits), shape)


def sparse_by_place(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """Computes a sparse categorical crossentropy on JAX by looking up the logit of the target class.

    Keras on JAX multiplies all log-probabilities by one-hot targets. With a large vocabulary, this product takes time
    and memory.
    """
    rank, shape = len(output.shape), tuple(output.shape[:-1])
    if not from_logits or axis not in (-1, rank - 1) or tuple(target.shape) not in (shape, (*shape, 1)):
        return original(target, output, from_logits=from_logits, axis=axis)
    places = ops.reshape(ops.cast(target, "int32"), (*shape, 1))
    return ops.logsumexp(output, axis=-1) - ops.squeeze(ops.take_along_axis(output, places, axis=-1), -1)


def _with_a_gradient(
    original: Callable[..., Any], x: Any, axis: Any = None, keepdims: bool = False, **options: Any
) -> Any:
    """Returns the maximum. Its gradient always reaches at least one value, whatever the rounding.

    jax (0.10) passes the gradient to the values that equal the maximum. XLA may recompute these values for the
    gradient, in a loop that rounds less. Then no value may equal the maximum. This happened for `x - mean(x)` after a
    convolution (docs/contributing/framework-pitfalls.md). So in this function, the value at the index of the maximum
    gets the gradient. If several values equal the maximum, they share the gradient.
    """
    x = ops.convert_to_tensor(x)
    if options.get("initial") is not None or not _is_float(x):
        return original(x, axis=axis, keepdims=keepdims, **options)
    rank = len(x.shape)
    axes = tuple(range(rank)) if axis is None else tuple(each % rank for each in np.atleast_1d(axis))
    others = tuple(each for each in range(rank) if each not in axes)
    rows = ops.reshape(ops.transpose(x, (*others, *axes)), (*(x.shape[each] for each in others), -1))

    @ops.custom_gradient
    def largest(rows: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            is_largest = ops.cast(ops.equal(rows, original(rows, axis=-1, keepdims=True)), rows.dtype)
            number = ops.sum(is_largest, axis=-1, keepdims=True)
            first = ops.one_hot(ops.argmax(rows, -1), rows.shape[-1], dtype=rows.dtype)
            share = ops.where(number > 1, is_largest / ops.maximum(number, 1), first)
            return share * ops.expand_dims(upstream, -1)

        return original(rows, axis=-1), gradient

    shape = [1 if each in axes else size for each, size in enumerate(x.shape)]
    return ops.reshape(largest(rows), shape) if keepdims else largest(rows)


def _least(original: Callable[..., Any], x: Any, axis: Any = None, keepdims: bool = False, **options: Any) -> Any:
    """Returns the minimum. Its gradient always reaches at least one value: see `_with_a_gradient`."""
    x = ops.convert_to_tensor(x)
    if options.get("initial") is not None or not _is_float(x):
        return original(x, axis=axis, keepdims=keepdims, **options)
    return -ops.max(-x, axis=axis, keepdims=keepdims)


def _rows_of_table(
    original: Callable[..., Any], x: Any, indices: Any, axis: Any = None, *, rows_by: str | None = None
) -> Any:
    """Takes rows of a variable in the variable's dtype, and casts only these rows to the dtype of the layer.

    Keras (3.15) casts the whole table. Then torch (2.13; not compiled) and jax (0.10) sum the gradient in half
    precision, token by token. In bfloat16, the sum of a thousand ones is 256. A GPU has no atomic addition of
    half-precision values, so tokens wait for each other. With the two segments of BERT and 4,096 tokens of 512 values,
    this sum took 27 of the 28 ms of a step on an H100 (jaxlib 0.11.2).

    On TensorFlow, `rows_by` is int64: TensorFlow (2.21) has no GPU kernel that flattens int32, and would flatten int32
    indices on the host. On jax, `rows_by` is int32. With int64 indices, XLA (jaxlib 0.10.2) ends the process when it
    splits a table ("Check failed: ShapeUtil::IsScalarWithElementType"). jax has int64 only if 64-bit types are enabled.

    Args:
        original: the backend's function.
        x: the table.
        indices: the indices of the rows.
        axis: the axis of the rows.
        rows_by: the integer dtype of the indices in the gradient; None: the dtype of `indices`.
    """
    if rows_by and ops.is_tensor(indices) and keras.backend.standardize_dtype(indices.dtype) in ("int32", "int64"):
        indices = ops.cast(indices, rows_by)
    if not isinstance(x, keras.Variable):
        return original(x, indices, axis)
    with AutocastScope(None):
        table = x.value
    return ops.cast(original(table, indices, axis), x.dtype)


def _as_one_product(original: Callable[..., Any], subscripts: str, *operands: Any, **options: Any) -> Any:
    """Computes an einsum of inputs and a kernel as one matrix product. Other einsums go to `original`.

    `EinsumDense` and `MultiHeadAttention` compute such einsums. Keras (3.15) on TensorFlow multiplies the rows of each
    sample by the kernel separately. Then TensorFlow (2.21) computes one gradient of the kernel for each sample, stores
    all of these gradients, and sums them.
    """
    number = 0 if len(operands) != 2 or options else _contracted(subscripts.replace(" ", ""))
    if not number:
        return original(subscripts, *operands, **options)
    inputs, kernel = (ops.convert_to_tensor(operand) for operand in operands)
    is_known = None not in (*kernel.shape, *inputs.shape[len(inputs.shape) - number :])
    if not (is_known and _is_float(inputs) and _is_float(kernel)):
        return original(subscripts, inputs, kernel)
    size = math.prod(kernel.shape[:number])
    outputs = ops.matmul(ops.reshape(inputs, (-1, size)), ops.reshape(kernel, (size, -1)))
    return ops.reshape(outputs, (*ops.shape(inputs)[:-number], *kernel.shape[number:]))


@functools.cache
def _contracted(equation: str) -> int:
    """Returns the number of axes that an einsum of inputs and a kernel sums over: 1 for `"abc,cde->abde"`.

    These axes must be the last axes of the inputs and the first axes of the kernel. For any other equation, the result
    is 0.
    """
    found = re.fullmatch(r"(\.{3}\w*|\w+)(\w+),\2(\w*)->\1\3", equation)
    letters = "".join(found.groups()).replace(".", "") if found else ""
    return len(found[2]) if found and len(set(letters)) == len(letters) else 0


def _by_groups(original: Callable[..., Any], layer: Any, inputs: Any) -> Any:
    """Computes `GroupNormalization` on torch with PyTorch's `group_norm`.

    Keras makes about ten passes over the inputs, and Inductor (2.13) compiles these passes to strided loops. With
    Keras' code, a small U-Net took 1.3 times as long as the same network in PyTorch.
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
    # Not `torch.nn.functional.group_norm`, which raises for groups of one value.
    outputs = torch.group_norm(x, layer.groups, gamma, beta, layer.epsilon)
    return ops.cast(ops.cast(ops.moveaxis(outputs, 1, axis), inputs.dtype), layer.compute_dtype)


def _without_padding(
    original: Callable[..., Any], inputs: Any, pool_size: Any, strides: Any = None, padding: str = "valid",
    data_format: str | None = None,
) -> Any:  # fmt: skip
    """Computes average pooling on torch without counting the padding.

    With `padding="same"`, one side may need more padding than the other side. Then Keras repeats the border values and
    counts them twice. For the values 0 to 15 in four rows, a 3 x 3 window and strides of 2, Keras 3.15 returns 6.67
    instead of 6.5.
    """
    inputs = ops.convert_to_tensor(inputs)
    rank = len(inputs.shape) - 2
    sizes, steps = (
        tuple(each) if isinstance(each, (tuple, list)) else (int(each),) * rank
        for each in (pool_size, pool_size if strides is None else strides)
    )
    is_last = (data_format or keras.config.image_data_format()) == "channels_last"
    lengths = tuple(inputs.shape[1:-1] if is_last else inputs.shape[2:])
    is_known = padding == "same" and None not in lengths
    pads = [max((-(-n // step) - 1) * step + k - n, 0) for n, k, step in zip(lengths, sizes, steps) if is_known]
    if all(pad % 2 == 0 for pad in pads):
        return original(inputs, pool_size, strides, padding, data_format)
    within = [(pad // 2, pad - pad // 2) for pad in pads]
    widths = [(0, 0), *within, (0, 0)] if is_last else [(0, 0), (0, 0), *within]
    averages, shares = (
        original(ops.pad(each, widths), pool_size, strides, "valid", data_format)
        for each in (inputs, ops.ones_like(inputs[:1], dtype="float64"))
    )
    return averages * ops.cast(1 / shares, averages.dtype)


def _mirrored(
    original: Callable[..., Any], x: Any, pad_width: Sequence[Sequence[int]], mode: str = "constant", **values: Any
) -> Any:
    """Pads an array on torch. With `"symmetric"`, the padding is the array's values mirrored at the border.

    With `"symmetric"`, Keras repeats the border value, which is correct only for a width of 1. If a single width is
    given for all axes, Keras pads only the last axis.
    """
    x = ops.convert_to_tensor(x)
    pad_width = np.broadcast_to(pad_width, (len(x.shape), 2)).tolist()
    if mode != "symmetric":
        return original(x, pad_width, mode=mode, **values)
    for axis, (before, after) in enumerate(pad_width):
        if before or after:
            places = np.pad(np.arange(x.shape[axis]), (before, after), mode="symmetric")
            x = ops.take(x, ops.convert_to_tensor(places, "int32"), axis=axis)
    return x


def _inputs_first(
    original: Callable[..., Any], layer: Any, sequences: Any, initial_state: Any, mask: Any, training: bool = False
) -> Any:
    """Runs `RNN.inner_loop`. For an LSTM without dropout, multiplies all inputs by the kernel before the loop.

    Keras (3.15) computes this product within the loop, once for each time step. On jax, the gradient of the kernel is
    then also summed over the devices at each time step. For a bidirectional LSTM, two devices sent 34.7 MB a step
    instead of 18.3 MB, and a step took 1.2 times as long.
    """
    cell = layer.cell
    # With implementation 2, the cell computes all gates by one product.
    is_one = getattr(cell, "implementation", None) == 2 and cell.dtype_policy == layer.dtype_policy
    is_plain = is_one and not layer.stateful and not (training and cell.dropout) and None not in sequences.shape[1:]
    if type(cell) is not keras.layers.LSTMCell or not is_plain:
        return original(layer, sequences, initial_state, mask=mask, training=training)

    def step(inputs: Any, states: list[Any]) -> tuple[Any, list[Any]]:
        gates = ops.split(ops.add(inputs, ops.matmul(states[0], cell.recurrent_kernel)), 4, axis=1)
        carry, output = cell._compute_carry_and_output_fused(gates, states[1])
        hidden = output * cell.activation(carry)
        return hidden, [hidden, carry]

    projected = ops.matmul(sequences, cell.kernel)
    return backend.rnn(
        step,
        ops.add(projected, cell.bias) if cell.use_bias else projected,
        initial_state,
        go_backwards=layer.go_backwards,
        mask=mask,
        unroll=layer.unroll,
        input_length=sequences.shape[1],
        zero_output_for_mask=layer.zero_output_for_mask,
        return_all_outputs=layer.return_sequences,
    )


_REPLACEMENTS: dict[str, dict[tuple[str, str], Callable[..., Any]]] = {
    "tensorflow": {
        ("nn", "categorical_crossentropy"): of_values,
        ("nn", "binary_crossentropy"): of_values,
        ("nn", "sparse_categorical_crossentropy"): sparse_of_values,
        ("nn", "dot_product_attention"): _zeros_where_all_is_masked,
        ("numpy", "take"): functools.partial(_rows_of_table, rows_by="int64"),
        ("numpy", "einsum"): _as_one_product,
        ("numpy", "argmax"): _first_largest,
        ("nn", "gelu"): _exact_gelu,
        ("nn", "leaky_relu"): _leaky_relu,
        ("image", "resize"): images.resize,
        ("image", "affine_transform"): images.affine,
        ("image", "perspective_transform"): images.perspective,
    },
    "torch": {
        ("numpy", "take"): _rows_of_table,
        ("nn", "sparse_categorical_crossentropy"): sparse_of_rows,
        ("nn", "dot_product_attention"): _zeros_where_all_is_masked,
        ("image", "resize"): images.resize,
        ("nn", "average_pool"): _without_padding,
        ("numpy", "pad"): _mirrored,
        ("nn", "conv"): channels_last_by_strides,
        ("nn", "conv_transpose"): channels_last_by_strides,
    },
    "jax": {
        ("nn", "sparse_categorical_crossentropy"): sparse_by_place,
        ("nn", "dot_product_attention"): _zeros_where_all_is_masked,
        ("numpy", "take"): functools.partial(_rows_of_table, rows_by="int32"),
        ("numpy", "absolute"): _absolute,
        ("numpy", "abs"): _absolute,
        ("numpy", "max"): _with_a_gradient,
        ("numpy", "amax"): _with_a_gradient,
        ("numpy", "min"): _least,
        ("numpy", "amin"): _least,
        ("nn", "leaky_relu"): _leaky_relu,
        ("image", "perspective_transform"): images.perspective,
        ("image", "elastic_transform"): images.elastic_outside_of_a_program,
    },
}
