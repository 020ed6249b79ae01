"""Makes functions of Keras that compute otherwise on one backend compute alike on all.

Crossentropies are the same functions of their arguments on all backends, and take no more memory than needed.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend
from keras.src.backend.common.variables import AutocastScope

from kerasdp.errors import UserError
from kerasdp.keras_compat import moved_images, torch_functions
from kerasdp.keras_compat.patches import in_place_of, replaced_in_each
from kerasdp.keras_compat.recurrent import inputs_first


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
    found += [(keras.layers.RNN, "inner_loop", inputs_first)]
    found += [(keras.callbacks.SwapEMAWeights, "on_predict_end", _swapped_back)]
    found += [(keras.layers.RandomHue, "_transform_value_range", _in_its_own_type)]
    if keras.backend.backend() == "torch":
        found += [(keras.layers.GroupNormalization, "call", torch_functions.by_groups)]
        found += [(keras.layers.RandomBrightness, "transform_images", torch_functions.of_a_copy)]
    return replaced_in_each((owner, {name: in_place_of(getattr(owner, name), other)}) for owner, name, other in found)


def _swapped_back(original: Callable[..., Any], callback: Any, logs: Any = None) -> None:
    """Puts the trained weights back after a prediction with averaged ones.

    Keras 3.15 asks for the opposite (`if not self._ema_weights_in_model`), so training continues from the averages.
    """
    original(callback, logs)
    if callback._ema_weights_in_model:
        callback.on_test_end(logs)


def _in_its_own_type(original: Callable[..., Any], layer: Any, images: Any, *ranges: Any) -> Any:
    """Moves the range of images in float64 where the layer computes in it, which `RandomHue` (3.15) does in float32."""
    return original(layer, images, *ranges, dtype="float64" if layer.compute_dtype == "float64" else "float32")


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
        return keras.backend.backend() == "jax" and _is_float64(query)
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


# At exactly 0, which zero inputs and zero biases give, these have other gradients on one backend (Keras 3.15, jax 0.10,
# TensorFlow 2.21) than on the two others, whose gradients these have.


def _absolute(original: Callable[..., Any], x: Any) -> Any:
    x = ops.convert_to_tensor(x)
    return ops.sign(x) * x if _is_float(x) else original(x)


def _is_float(x: Any) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype))


def _leaky_relu(original: Callable[..., Any], x: Any, negative_slope: float = 0.2) -> Any:
    x = ops.convert_to_tensor(x)
    # TensorFlow (2.21) has another slope only in float64, where it is one of float32.
    is_alike = keras.backend.backend() == "tensorflow" and not _is_float64(x)
    return original(x, negative_slope) if is_alike else ops.where(x > 0, x, negative_slope * x)


def _selu(_: Callable[..., Any], x: Any) -> Any:
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    x = ops.convert_to_tensor(x)
    return ops.where(x > 0, scale * x, scale * alpha * ops.expm1(_of_negative(x)))


def _celu(_: Callable[..., Any], x: Any, alpha: float = 1.0) -> Any:
    x = ops.convert_to_tensor(x)
    return ops.where(x > 0, x, alpha * ops.expm1(_of_negative(x) / alpha))


def _of_negative(x: Any) -> Any:
    return ops.where(x > 0, ops.zeros_like(x), x)


def _whole_at_bounds(original: Callable[..., Any], x: Any, x_min: Any, x_max: Any) -> Any:
    """Returns a `clip` whose gradient is 1 where a number is exactly a bound.

    JAX (0.10) gives a half; so does torch from 2.14 on, where 2.13 gives 1.
    """
    x = ops.convert_to_tensor(x)  # of a variable: JAX (0.10) takes none for a tensor while it traces
    clipped = original(x, x_min, x_max)
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(clipped.dtype)):
        return clipped
    return ops.where(ops.equal(clipped, x), x, clipped)


def _first_largest(original: Callable[..., Any], x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    """Returns the place of the first of the largest numbers, as on torch and in NumPy.

    On TensorFlow and JAX (on CPUs) Keras takes -0.0 for less than 0.0, by six operations on all numbers.
    """
    if axis is None or keepdims:
        return original(x, axis=axis, keepdims=keepdims)
    own, x = _functions("numpy", "argmax"), ops.convert_to_tensor(x)
    return own.tf.argmax(x, axis, "int32") if hasattr(own, "tf") else own.jnp.argmax(x, axis)


def _half_at_ties(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
    """Returns a maximum or minimum whose gradient goes to both of two equal numbers, half to each."""
    larger = original(x1, x2)
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(larger.dtype)):
        return larger
    x1, x2 = (ops.cast(x, larger.dtype) for x in (x1, x2))
    return ops.where(ops.equal(x1, x2), 0.5 * x1 + 0.5 * x2, larger)


# In float64, where TensorFlow (2.21) computes with constants of float32, or wholly in float32.


def _exact_gelu(original: Callable[..., Any], x: Any, approximate: bool = True) -> Any:
    x = ops.convert_to_tensor(x)
    if not _is_float64(x):
        return original(x, approximate)
    if approximate:
        return 0.5 * x * (1 + ops.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + ops.erf(x / np.sqrt(2)))


def _exact_resize(
    original: Callable[..., Any], images: Any, size: tuple[int, int], interpolation: str = "bilinear",
    antialias: bool = False, **choices: Any,
) -> Any:  # fmt: skip
    """Returns a `resize` that interpolates by a product with a matrix for each axis.

    Cubically, as jax does: torch (2.13) has another polynomial (-0.75 in place of -0.5, which moves numbers by a
    tenth), TensorFlow a table of it (1e-4). And linearly in float64.
    """
    images = ops.convert_to_tensor(images)
    is_first = (choices.get("data_format") or keras.config.image_data_format()) == "channels_first"
    axes = (-2, -1) if is_first else (-3, -2)
    crops, pads = choices.get("crop_to_aspect_ratio"), choices.get("pad_to_aspect_ratio")
    is_usual = not (crops and pads) and not ((crops or pads) and None in (images.shape[axis] for axis in axes))
    is_other = interpolation == "bicubic" or (interpolation == "bilinear" and _is_float64(images))
    if not (is_usual and is_other):
        return original(images, size, interpolation, antialias, **choices)
    if not _is_float(images):
        kind = keras.backend.standardize_dtype(images.dtype)
        resized = _exact_resize(original, ops.cast(images, "float32"), size, interpolation, antialias, **choices)
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


def _elastic_outside_of_a_program(
    original: Callable[..., Any], images: Any, alpha: Any = 20.0, sigma: Any = 5.0, **choices: Any
) -> Any:
    """Refuses a RandomElasticTransform in a step of jax, where Keras (3.15.1) ends in an AttributeError of its own.

    The size of its kernel is a random number, which a program that XLA compiles cannot have.
    """
    try:
        int(sigma)
    except Exception as error:
        raise UserError(
            "RandomElasticTransform: expected numbers to be known, of which jax compiles the step. Apply the layer in "
            "the data (tf.data's map), or train with torch or tensorflow"
        ) from error
    return original(images, alpha, sigma, **choices)


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


def _is_float64(tensor: Any) -> bool:
    return keras.backend.standardize_dtype(tensor.dtype) == "float64"


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
    rounds less: of `x - mean(x)` after a convolution none was equal (docs/internals/framework-pitfalls.md). So where
    there is one such number, its place tells; only several share the gradient.
    """
    x = ops.convert_to_tensor(x)
    if options.get("initial") is not None or not _is_float(x):
        return original(x, axis=axis, keepdims=keepdims, **options)
    rank = len(x.shape)
    axes = tuple(range(rank)) if axis is None else tuple(each % rank for each in np.atleast_1d(axis))
    others = tuple(each for each in range(rank) if each not in axes)

    @ops.custom_gradient
    def largest(x: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            found = original(x, axis=axes, keepdims=True)
            is_largest = ops.cast(ops.equal(x, found), x.dtype)
            number = ops.sum(is_largest, axis=axes, keepdims=True)
            rows = ops.transpose(x, (*others, *axes))
            flat = ops.reshape(rows, (*(x.shape[each] for each in others), -1))
            first = ops.reshape(ops.one_hot(ops.argmax(flat, -1), flat.shape[-1], dtype=x.dtype), rows.shape)
            first = ops.transpose(first, tuple(int(each) for each in np.argsort((*others, *axes))))
            share = ops.where(number > 1, is_largest / ops.maximum(number, 1), first)
            return share * ops.reshape(upstream, found.shape)

        return original(x, axis=axes, keepdims=keepdims), gradient

    return largest(x)


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


def _added_up_in_float32(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
    """Returns an operation on numbers where the gradient of what has fewer is added up in float32.

    XLA (jaxlib 0.10, on CPUs) adds those up in half precision: of the bias of a convolution in bfloat16, 3,000 times 1
    is 256. Sums of `jax.numpy` are in float32, but not those that JAX makes for a gradient.
    """
    is_spread = _is_half(x1) and _is_half(x2) and x1.shape != x2.shape
    if is_spread and all(isinstance(size, int) for size in (*x1.shape, *x2.shape)):  # no symbol, as of an export
        shape = np.broadcast_shapes(x1.shape, x2.shape)
        x1, x2 = (x if x.shape == shape else ops.broadcast_to(x, shape) for x in (x1, x2))
    return original(x1, x2)


def _spread(original: Callable[..., Any], x: Any, shape: Any) -> Any:
    """Returns a `broadcast_to` whose gradient is added up in float32."""
    return ops.cast(original(ops.cast(x, "float32"), shape), x.dtype) if _is_half(x) else original(x, shape)


def _is_half(x: Any) -> bool:
    """Returns whether a variable or an array of JAX, none that is sparse, has numbers of 16 bits."""
    is_dense = isinstance(x, keras.Variable) or hasattr(x, "at")
    return is_dense and keras.backend.standardize_dtype(x.dtype) in ("bfloat16", "float16")


def _as_one_product(original: Callable[..., Any], subscripts: str, *operands: Any, **options: Any) -> Any:
    """Returns an einsum; of inputs and a kernel, as in `EinsumDense` and `MultiHeadAttention`, by one matrix product.

    Keras (3.15) on TensorFlow multiplies the rows of each sample by the kernel alone. For the gradient, TensorFlow
    (2.21) then computes that of the kernel once for each sample, keeps them all, and adds them up.
    """
    number = None if len(operands) != 2 or options else _contracted(subscripts.replace(" ", ""))
    if number is None:
        return original(subscripts, *operands, **options)
    inputs, kernel = (ops.convert_to_tensor(operand) for operand in operands)
    is_known = None not in (*kernel.shape, *inputs.shape[len(inputs.shape) - number :])
    if not (is_known and _is_float(inputs) and _is_float(kernel)):
        return original(subscripts, inputs, kernel)
    size = math.prod(kernel.shape[:number])
    outputs = ops.matmul(ops.reshape(inputs, (-1, size)), ops.reshape(kernel, (size, -1)))
    return ops.reshape(outputs, (*ops.shape(inputs)[:-number], *kernel.shape[number:]))


@functools.cache
def _contracted(equation: str) -> int | None:
    """Returns how many axes, the last of the inputs and the first of the kernel, are summed over: `"abc,cde->abde"`: 1.

    None where that is not all that an equation says.
    """
    given, kernel, outputs = [*equation.replace("->", ",").split(","), "", ""][:3]
    shared = [letter for letter in kernel if letter in given]
    number = len(shared)
    first, rest = given[: len(given) - number], kernel[number:]
    is_product = given[len(first) :] == kernel[:number] and outputs == first + rest
    letters = (first + kernel).replace("...", "", 1)
    is_plain = letters.isalpha() and len(set(letters)) == len(letters) and "..." not in kernel
    return number if number and first and is_product and is_plain else None


_REPLACEMENTS: dict[str, dict[tuple[str, str], Callable[..., Any]]] = {
    "tensorflow": {
        ("nn", "categorical_crossentropy"): of_values,
        ("nn", "binary_crossentropy"): of_values,
        ("nn", "sparse_categorical_crossentropy"): sparse_of_values,
        ("nn", "dot_product_attention"): _zeros_where_all_is_masked,
        ("numpy", "maximum"): _half_at_ties,
        ("numpy", "minimum"): _half_at_ties,
        ("numpy", "argmax"): _first_largest,
        ("numpy", "take"): functools.partial(_rows_of_table, rows_by="int64"),
        ("numpy", "einsum"): _as_one_product,
        ("nn", "selu"): _selu,
        ("nn", "celu"): _celu,
        ("nn", "gelu"): _exact_gelu,
        ("nn", "leaky_relu"): _leaky_relu,
        ("image", "resize"): _exact_resize,
        ("image", "affine_transform"): moved_images.affine,
        ("image", "perspective_transform"): moved_images.perspective,
    },
    "torch": {
        ("numpy", "take"): _rows_of_table,
        ("numpy", "clip"): _whole_at_bounds,
        ("nn", "sparse_categorical_crossentropy"): sparse_of_rows,
        ("nn", "dot_product_attention"): _zeros_where_all_is_masked,
        ("image", "resize"): _exact_resize,
        ("nn", "average_pool"): torch_functions.without_padding,
        ("numpy", "pad"): torch_functions.mirrored,
        ("nn", "conv"): channels_last_by_strides,
        ("nn", "conv_transpose"): channels_last_by_strides,
    },
    "jax": {
        ("nn", "sparse_categorical_crossentropy"): sparse_by_place,
        ("nn", "dot_product_attention"): _zeros_where_all_is_masked,
        ("numpy", "take"): functools.partial(_rows_of_table, rows_by="int32"),
        ("numpy", "add"): _added_up_in_float32,
        ("numpy", "subtract"): _added_up_in_float32,
        ("numpy", "multiply"): _added_up_in_float32,
        ("numpy", "broadcast_to"): _spread,
        ("numpy", "clip"): _whole_at_bounds,
        ("numpy", "argmax"): _first_largest,
        ("numpy", "max"): _with_a_gradient,
        ("numpy", "amax"): _with_a_gradient,
        ("numpy", "min"): _least,
        ("numpy", "amin"): _least,
        ("numpy", "absolute"): _absolute,
        ("numpy", "abs"): _absolute,
        ("nn", "leaky_relu"): _leaky_relu,
        ("image", "perspective_transform"): moved_images.perspective,
        ("image", "elastic_transform"): _elastic_outside_of_a_program,
    },
}
