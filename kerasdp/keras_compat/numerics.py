"""Makes functions of Keras that compute otherwise on one backend compute alike on all.

Crossentropies are the same functions of their arguments on all backends, and take no more memory than needed.
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
    """Replaces the functions of the present backend that give other losses or gradients than those of the others.

    Keras 3.15: functions of `keras.src.backend.nn` and `.numpy` (3.16: `keras.src.backend.ops.nn`), which the public
    `keras.ops` and the losses, metrics and layers call. No public switch. Their values are the same functions of their
    arguments elsewhere.

    Raises:
        UserError: if this Keras has them elsewhere.
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
    """Puts the trained weights back after a prediction with averaged ones.

    Keras 3.15 asks for the opposite (`if not self._ema_weights_in_model`), so training continues from the averages.
    """
    original(callback, logs)
    if callback._ema_weights_in_model:
        callback.on_test_end(logs)


# Of which Keras 3.16 has none of its own: `keras.ops.amax` calls `max` of the backend.
_GONE = ("amax", "amin")


def _functions(module: str, name: str) -> Any:
    """Returns the module of the present backend in which Keras looks a function up.

    Where Keras 3.16 has it in `backend.ops` (keras-team/keras #23642), `backend.numpy` is the backend for NumPy.
    """
    found: Any = getattr(getattr(backend, "ops", backend), module, None)
    kind = keras.backend.backend()
    if not hasattr(found, name) or not found.__name__.startswith(f"keras.src.backend.{kind}."):
        raise UserError(
            f"kerasdp needs Keras 3.15 or 3.16. Received: {keras.__version__}, without {kind}.{module}.{name}"
        )
    return found


def _zeros_where_all_is_masked(
    original: Callable[..., Any], query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None,
    scale: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Returns an attention that gives zeros for a query whose keys are all masked, as `keras.layers.Softmax` does.

    Elsewhere Keras gives such a query the mean of all values. Which of the two it is depends on the path: dropout leads
    through `Softmax`, and KerasHub (0.32) goes that way on TensorFlow only. On torch, Keras adds a large negative
    number to what is masked, with which its fused kernels (2.13) have wrong gradients for such a query: of the
    logarithm of the sum of exponentials, which they keep, all but that number is lost. So here nothing is masked of it.
    """
    # Else Keras rounds it to float32 on TensorFlow.
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
    """Returns whether attention is computed by `_by_heads`.

    On jax in float64, where `jax.nn` (0.10) has its softmax in float32, whatever it is given. On TensorFlow, whose
    einsum (2.21) takes twice as long as the same by transposes and products.
    """
    if keras.backend.backend() != "tensorflow":
        return keras.backend.backend() == "jax" and images.is_float64(query)
    is_plain = not (options.get("flash_attention") or options.get("attn_logits_soft_cap"))
    return is_plain and all(len(each.shape) == 4 and None not in each.shape[1:] for each in (query, key, value))


def _by_heads(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, scale: Any, is_causal: bool = False, **_: Any
) -> Any:
    """Returns an attention by one product of matrices for each sample and head; no softmax in half precision."""
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
    """Returns a convolution that reads its inputs where they are.

    Keras (3.15) on torch copies inputs with channels last into memory with channels first, and back before the
    convolution (keras-team/keras #23279, mended later). To torch both are one kind of tensor with other strides.
    """
    given = _signature(original).bind(*args, **options)
    inputs = ops.convert_to_tensor(given.arguments["inputs"])
    is_last = (given.arguments.get("data_format") or keras.config.image_data_format()) == "channels_last"
    kernel = ops.convert_to_tensor(given.arguments["kernel"])
    if kernel.shape[-1] == 1 and keras.backend.standardize_dtype(kernel.dtype) == "float64":
        # Of one filter (of a transposed convolution: one channel) in float64 PyTorch (2.13) has no gradient on the CPU,
        # "slow_conv2d: grad_weight must be contiguous", unless its memory is in PyTorch's own order.
        kernel = kernel.movedim((-1, -2), (0, 1)).contiguous().movedim((0, 1), (-1, -2))
    given.arguments["kernel"] = kernel
    if is_last and inputs.dim() > 3:  # a tensor of three axes has one layout
        given.arguments |= {"inputs": inputs.movedim(-1, 1), "data_format": "channels_first"}
        return original(*given.args, **given.kwargs).movedim(1, -1)
    return original(*given.args, **given.kwargs)


_signature = functools.cache(inspect.signature)


def _absolute(original: Callable[..., Any], x: Any) -> Any:
    """Returns absolute numbers whose gradient at exactly 0 is 0, where jax (0.10) has 1: L1 of a bias begins there."""
    x = ops.convert_to_tensor(x)
    return ops.sign(x) * x if _is_float(x) else original(x)


def _is_float(x: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def _leaky_relu(_: Callable[..., Any], x: Any, negative_slope: float = 0.2) -> Any:
    """Returns a leaky ReLU whose slope is the lower one at exactly 0, where jax (0.10) has the upper one.

    A convolution of a black border, with a bias of 0, gives zeros. TensorFlow (2.21) rounds the slope to float32.
    """
    x = ops.convert_to_tensor(x)
    return ops.where(x > 0, x, negative_slope * x)


def _first_largest(original: Callable[..., Any], x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Returns the place of the first of the largest numbers, as an accuracy asks for it, by TensorFlow's own function.

    Keras (3.15) first makes -0.0 less than 0.0. It asks for the sign by a comparison in int32, for which TensorFlow
    (2.21) has no kernel on GPUs: in each step the logits would go through the host.
    """
    if axis is None or keepdims:
        return original(x, axis=axis, keepdims=keepdims)
    return _functions("numpy", "argmax").tf.argmax(ops.convert_to_tensor(x), axis, "int32")


# In float64, where TensorFlow (2.21) computes with constants of float32, or wholly in float32.


def _exact_gelu(original: Callable[..., Any], x: Any, approximate: bool = True) -> Any:
    x = ops.convert_to_tensor(x)
    if not images.is_float64(x):
        return original(x, approximate)
    if approximate:
        return 0.5 * x * (1 + ops.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + ops.erf(x / np.sqrt(2)))


def of_values(original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, **axis: Any) -> Any:
    """Returns a crossentropy of the values that it is given.

    On TensorFlow, Keras looks where they come from: if from a softmax or sigmoid, it takes the logits behind that, also
    with `from_logits=True`. On other backends it clips the probabilities, and the gradients of what is clipped are 0.
    """
    return original(target, ops.copy(output), from_logits=from_logits, **axis)


def sparse_of_values(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """Returns the crossentropy of classes, of the values that it is given.

    On TensorFlow, Keras normalizes probabilities after it has clipped them, on other backends before: where the
    probability of the class is clipped, gradients are others.
    """
    output = ops.copy(output)
    if from_logits or axis not in (-1, len(output.shape) - 1):  # which Keras refuses
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
    """Returns the crossentropy of classes, with one row for each pixel or token.

    On torch, Keras moves the axis of the classes to the second place: of probabilities the gradient then fails (2.13,
    CPU: "grad_input must be contiguous"), and of logits it takes copies of them, in another order.
    """
    rank, shape = len(output.shape), tuple(output.shape[:-1])
    if rank < 3 or axis not in (-1, rank - 1) or tuple(target.shape) not in (shape, (*shape, 1)):
        return original(target, output, from_logits=from_logits, axis=axis)
    rows = ops.reshape(target, (-1,)), ops.reshape(output, (-1, output.shape[-1]))
    return ops.reshape(original(*rows, from_logits=from_logits), shape)


def sparse_by_place(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    """Returns the crossentropy of classes that looks the logit of the class up.

    On JAX, Keras multiplies all logarithms by one-hot targets, which of a large vocabulary takes time and memory.
    """
    rank, shape = len(output.shape), tuple(output.shape[:-1])
    if not from_logits or axis not in (-1, rank - 1) or tuple(target.shape) not in (shape, (*shape, 1)):
        return original(target, output, from_logits=from_logits, axis=axis)
    places = ops.reshape(ops.cast(target, "int32"), (*shape, 1))
    return ops.logsumexp(output, axis=-1) - ops.squeeze(ops.take_along_axis(output, places, axis=-1), -1)


def _with_a_gradient(
    original: Callable[..., Any], x: Any, axis: Any = None, keepdims: bool = False, **options: Any
) -> Any:
    """Returns the maximum, whose gradient is never lost.

    jax (0.10) gives it to the numbers that equal the maximum. XLA may compute these once more for that, in a loop that
    rounds less: of `x - mean(x)` after a convolution none was equal (docs/contributing/framework-pitfalls.md). So where
    there is one such number, its place tells; only several share the gradient.
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
    """Returns the minimum, as `_with_a_gradient` the maximum."""
    x = ops.convert_to_tensor(x)
    if options.get("initial") is not None or not _is_float(x):
        return original(x, axis=axis, keepdims=keepdims, **options)
    return -ops.max(-x, axis=axis, keepdims=keepdims)


def _rows_of_table(
    original: Callable[..., Any], x: Any, indices: Any, axis: Any = None, *, rows_by: str | None = None
) -> Any:
    """Takes rows of a variable in its own type, and casts the rows alone where layers compute in another.

    Keras (3.15) casts the whole table. Its gradient is then added up in half precision, token by token, on torch (2.13;
    not compiled) and jax (0.10): in bfloat16 a thousand times 1 is 256. And on a GPU, which has no atomic addition of
    such numbers, tokens wait for each other: of BERT's two segments, with 4,096 tokens of 512 numbers, that was 27 ms
    of a step of 28 on an H100 (jaxlib 0.11.2).

    Args:
        original: of the backend.
        x: the table.
        indices: of the rows.
        axis: of the rows.
        rows_by: the type of indices in the backend's gradient, in place of another integer type. TensorFlow (2.21) has
            no kernel on GPUs that flattens int32: it would do that on the host. XLA (jaxlib 0.10.2) ends the process,
            "Check failed: ShapeUtil::IsScalarWithElementType", where it is to split a table whose rows are numbered in
            int64, of which there are any only where numbers of 64 bits are kept.
    """
    if rows_by and ops.is_tensor(indices) and keras.backend.standardize_dtype(indices.dtype) in ("int32", "int64"):
        indices = ops.cast(indices, rows_by)
    if not isinstance(x, keras.Variable):
        return original(x, indices, axis)
    with AutocastScope(None):
        table = x.value
    return ops.cast(original(table, indices, axis), x.dtype)


def _as_one_product(original: Callable[..., Any], subscripts: str, *operands: Any, **options: Any) -> Any:
    """Returns an einsum; of inputs and a kernel, as in `EinsumDense` and `MultiHeadAttention`, by one matrix product.

    Keras (3.15) on TensorFlow multiplies the rows of each sample by the kernel alone. For the gradient, TensorFlow
    (2.21) then computes that of the kernel once for each sample, keeps them all, and adds them up.
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
    """Returns how many axes, the last of the inputs and the first of the kernel, are summed over: `"abc,cde->abde"`: 1.

    0 where that is not all that an equation says.
    """
    found = re.fullmatch(r"(\.{3}\w*|\w+)(\w+),\2(\w*)->\1\3", equation)
    letters = "".join(found.groups()).replace(".", "") if found else ""
    return len(found[2]) if found and len(set(letters)) == len(letters) else 0


def _by_groups(original: Callable[..., Any], layer: Any, inputs: Any) -> Any:
    """Returns what a `GroupNormalization` gives on torch, by PyTorch's own function.

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


def _without_padding(
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
    """Returns an array with padding; with `"symmetric"` of its own numbers, mirrored at its border.

    There Keras repeats the number at the border, which is the same for a width of 1 alone. One width for all axes it
    takes for that of the last.
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
    """Returns what `RNN.inner_loop` gives; an LSTM without dropout multiplies all inputs by the kernel first.

    Keras (3.15) has that product within the loop, once for each place. On jax the gradient of the kernel is then added
    up over the devices at each place, too: of an LSTM in both directions two devices sent 34.7 MB a step in place of
    18.3, and took 1.2 times as long.
    """
    cell = layer.cell
    # Computes by one product of all gates, and does nothing else with inputs and states.
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
