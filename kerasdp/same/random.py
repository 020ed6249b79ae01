"""Draws random values that are the same on every backend and device count.

A value depends on the seed, the step and the sample. Keras draws with the random generator of its backend. So in Keras,
dropout differs between backends, and every replica draws the same values for its shard of the batch. Here a
counter-based generator returns "value `j` of sample `i`", where `i` is the sample's row in the GLOBAL batch. A replica
with samples 32 to 63 draws the same values for these samples as one device.

The generator is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3;
SC 2011, doi:10.1145/2063384.2063405). It uses int32 operations, which wrap around on torch, JAX and TensorFlow. It does
not use unsigned integers, because some operations are missing for them (torch 2.13 cannot shift uint32).
"""

import contextlib
import functools
import importlib
import math
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.patches import current_step, step_with
from kerasdp.keras_compat.random import is_in_layer_call, is_in_tensorflow_graph, next_seed, wrap_draws
from kerasdp.same.replica_context import RowOrder, current

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA
# Random bits of a uniform value. float32 holds them exactly, so the value is the same in every precision.
UNIFORM_BITS = 24


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns two int32 values of random bits for each counter, by Threefry-2x32-20.

    Args:
        key: two int32 tensors that broadcast with the counter. Their bits are used as unsigned integers.
        counter: two int32 tensors of the same shape.

    Returns:
        Two int32 tensors of that shape.
    """
    keys = (*key, ops.bitwise_xor(ops.bitwise_xor(key[0], key[1]), _KEY_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for block in range(5):
        for distance in _ROTATIONS[block % 2]:
            x = x + y
            y = ops.bitwise_xor(_rotate(y, distance), x)
        x = x + keys[(block + 1) % 3]
        y = y + keys[(block + 2) % 3] + (block + 1)
    return x, y


def _rotate(word: Any, distance: int) -> Any:
    # The right shift of a signed number fills up with the sign bit, which the mask removes.
    right = ops.bitwise_and(ops.right_shift(word, 32 - distance), (1 << distance) - 1)
    return ops.bitwise_or(ops.left_shift(word, distance), right)


# Makes values of a shape from two int32 arrays of shape `(entries of axis 0, half of the values of an entry)`.
# Its other arguments are hashable.
Maker = Callable[..., Any]


# Draws values of a shape from the key (a tensor of two integers, or two int) and the index of the first entry of
# axis 0.
Draw = Callable[[tuple[Any, ...], Any, Any], Any]


def _by(make: Maker, *choices: Any) -> Draw:
    """Returns a `Draw` that computes random bits and passes them, together with `choices`, to `make`.

    On JAX and TensorFlow, the `Draw` is one compiled function, from the key to the output of `make`. Otherwise
    TensorFlow (2.21) would keep the random bits, which are int32 tensors, in host memory on GPUs. Then it would compute
    a dropout mask on the host.
    """

    def draw(shape: tuple[Any, ...], state: Any, first: Any) -> Any:
        if keras.backend.backend() != "torch":
            state, first = ops.convert_to_tensor(state), ops.convert_to_tensor(first, "int32")
            return _compiled(make)(state, first, shape, choices)
        return _drawn(make, state, first, shape, choices)

    return draw


@functools.cache
def _compiled(make: Maker) -> Callable[..., Any]:
    """Returns a compiled function that draws with `make`. XLA compiles it again for each new shape and new choices."""
    xla = importlib.import_module(f"kerasdp.backends.{keras.backend.backend()}.xla")
    return xla.compiled(functools.partial(_drawn, make))


def _drawn(make: Maker, state: Any, first: Any, shape: tuple[Any, ...], choices: tuple[Any, ...]) -> Any:
    # This also moves the state to the device of the counters, such as the meta device for Keras' shapes on torch.
    state = ops.convert_to_tensor(ops.cast(state, "int32"), "int32")
    entries, numbers = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    row = ops.expand_dims(ops.arange(entries, dtype="int32"), 1) + first
    column = ops.expand_dims(ops.arange((numbers + 1) // 2, dtype="int32"), 0)
    counter = row + ops.zeros_like(column), column + ops.zeros_like(row)
    return make(shape, *threefry((state[0], state[1]), counter), *choices)


def _words(shape: tuple[Any, ...], x: Any, y: Any) -> Any:
    """Joins two halves of the random int32 values of each entry of axis 0, and reshapes them to `shape`."""
    return ops.reshape(ops.concatenate([x, y], axis=1)[:, : math.prod(shape[1:])], shape)


def _mask(shape: tuple[Any, ...], x: Any, y: Any, dropped: int) -> Any:
    """Returns bools that are False with a probability of `dropped / 2**UNIFORM_BITS`."""
    return _upper_bits(_words(shape, x, y)) >= dropped


def _uniform(shape: tuple[Any, ...], x: Any, y: Any, dtype: str) -> Any:
    """Returns values in [0, 1) without rounding error, in float64 if `dtype` is float64, else in float32."""
    return _in_unit_interval(_words(shape, x, y), dtype)


def _two_uniforms(shape: tuple[Any, ...], x: Any, y: Any, dtype: str) -> tuple[Any, Any]:
    """Returns two arrays of values in [0, 1), like `_uniform`: one from the bits `x`, one from the bits `y`."""
    return _in_unit_interval(x, dtype), _in_unit_interval(y, dtype)


def _whole(shape: tuple[Any, ...], x: Any, y: Any) -> Any:
    """Returns random integers from 0 to `2**31 - 1`."""
    return ops.bitwise_and(_words(shape, x, y), 0x7FFFFFFF)


def _integers(shape: tuple[Any, ...], x: Any, y: Any, low: int, high: int, dtype: str) -> Any:
    """Returns random integers from `low` to `high - 1`."""
    return ops.cast(low + ops.mod(_whole(shape, x, y), high - low), dtype)


def _upper_bits(drawn: Any) -> Any:
    """Returns the upper 24 bits of each int32 value, as an integer from 0 to `2**24 - 1`."""
    return ops.bitwise_and(ops.right_shift(drawn, 32 - UNIFORM_BITS), (1 << UNIFORM_BITS) - 1)


def _in_unit_interval(drawn: Any, dtype: Any) -> Any:
    wide = "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"
    return ops.cast(_upper_bits(drawn), wide) * 2.0**-UNIFORM_BITS


def bits(shape: tuple[Any, ...], seed: Any, tensor: Any = None) -> Any:
    """Draws random bits for a tensor of a batch.

    Args:
        shape: the shape of the result. The values of a sample depend on the sample's row in the global batch.
            `kerasdp.step.row_search` finds where the rows are in the tensor. For a tensor without rows, all replicas
            draw the same values.
        seed: an int, a pair of integers, or a `keras.random.SeedGenerator`, which is advanced.
        tensor: the tensor for which the bits are drawn. Its rows are on the same axis as the rows of the result.

    Returns:
        An int32 tensor of that shape; all 32 bits of each value are random.
    """
    return _for_rows(_by(_words), shape, seed, tensor)


def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    """Drops units like `keras.random.dropout`. The mask is bit-equal on every backend and device count.

    Args:
        inputs: a tensor.
        rate: the fraction of units to drop.
        noise_shape: the shape of the mask. A None in `noise_shape` stands for the size of that axis of the inputs.
        seed: see `bits`.
    """
    shape = list(ops.shape(inputs))
    for axis, size in enumerate(noise_shape or ()):
        if size is not None and (axis > 0 or size == 1):
            shape[axis] = size
    dropped = round(rate * 2**UNIFORM_BITS)
    keep = _for_rows(_by(_mask, dropped), tuple(shape), seed, inputs)
    scale = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
    return ops.where(keep, inputs * ops.cast(scale, inputs.dtype), ops.zeros((), dtype=inputs.dtype))


def uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    """Draws values like `keras.random.uniform`, in steps of `(maxval - minval) / 2**24`.

    See `bits` for `shape` and `seed`.
    """
    dtype = dtype or keras.config.floatx()
    numbers = _unit(shape, seed, dtype)
    if not (isinstance(minval, (int, float)) and isinstance(maxval, (int, float)) and (minval, maxval) == (0, 1)):
        numbers = minval + numbers * (maxval - minval)
    return ops.cast(numbers, dtype)


def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    """Draws values like `keras.random.normal`, by the method of Box and Muller (1958).

    The values are equal up to rounding on all backends. See `bits` for `shape` and `seed`.
    """

    dtype = dtype or keras.config.floatx()
    halves = _by(_two_uniforms, keras.backend.standardize_dtype(dtype))

    def numbers(shape: tuple[Any, ...], state: Any, first: Any) -> Any:
        x, y = halves(shape, state, first)
        radius = ops.sqrt(-2.0 * ops.log(x + 2.0**-UNIFORM_BITS))  # of a number in (0, 1]
        angle = 2.0 * math.pi * y
        return _words(shape, radius * ops.cos(angle), radius * ops.sin(angle))

    return ops.cast(mean + stddev * _for_rows(numbers, tuple(shape), seed), dtype)


def truncated_normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    """Draws values like `keras.random.truncated_normal`, by the inverse of the distribution function.

    See `bits` for `shape` and `seed`.
    """
    dtype = dtype or keras.config.floatx()
    centred = 2.0 * _unit(shape, seed, dtype) + (2.0**-UNIFORM_BITS - 1.0)
    numbers = math.sqrt(2.0) * ops.erfinv(math.erf(math.sqrt(2.0)) * centred)
    return ops.cast(mean + stddev * numbers, dtype)


def randint(shape: Any, minval: Any, maxval: Any, dtype: str = "int32", seed: Any = None) -> Any:
    """Draws random integers like `keras.random.randint`. See `bits` for `shape` and `seed`."""
    if isinstance(minval, int) and isinstance(maxval, int):
        integers = _by(_integers, minval, maxval, keras.backend.standardize_dtype(dtype))
        return _for_rows(integers, tuple(shape), seed)
    minval, maxval = (ops.cast(value, "int32") for value in (minval, maxval))
    words = _for_rows(_by(_whole), tuple(shape), seed)
    return ops.cast(minval + ops.mod(words, maxval - minval), dtype)


_PORTABLE = {function.__name__: function for function in (dropout, uniform, normal, truncated_normal, randint)}
_NOT_PORTABLE = ("beta", "binomial", "categorical", "gamma", "shuffle")


class _Drawing(NamedTuple):
    """Describes the layer, loss or step that draws random values.

    Attributes:
        name: the name of the layer, loss or step, for messages.
        inputs: the arguments of its call: a structure of tensors and other objects.
        unseeded: a function that returns two int32 values as the seed of a draw without a seed. None: see
            `portable_draws`.
    """

    name: str
    inputs: Any
    unseeded: Callable[[], Any] | None


# The name of user-defined code other than a layer with a seed generator.
UNNAMED = "a layer, loss or step"
# The name of the function of `Runner.step` while its rows are being found.
STEP = "the step"
_UNNAMED = _Drawing(UNNAMED, [], None)
# The names of code that draws before and between the steps. In a TensorFlow graph this is a function of `tf.data`.
# There, Keras' layers draw with TensorFlow on every backend, and continue to do so.
INITIALIZER, DATA = "an initializer", "the data"
OF_DATA = (INITIALIZER, DATA)


def _running_draw() -> _Drawing | None:
    """Returns the layer, loss or step that draws random values now; None outside of a run."""
    step = current_step()  # in a TensorFlow thread of a replica, it may have `replica` only
    drawing: _Drawing | None = step.drawing
    if drawing is not None and drawing.name in OF_DATA and step.weight is None and is_in_tensorflow_graph():
        return None
    return _UNNAMED if drawing is None and step.replica is not None else drawing


def portable_draws(
    name: str,
    inputs: Any = None,
    unseeded: Callable[[], Any] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which this module draws the random values of Keras' layers and `keras.random`.

    For distributions that this module does not have, the backend draws, and a warning is printed.

    Args:
        name: the name of the layer or step that draws, for messages, such as "layer noise".
        inputs: the arguments of the layer's call: a structure of tensors and other objects.
        unseeded: a function that returns two int32 values as the seed of a draw without a seed. None: outside of
            layers, Keras' global generator provides the seed.
    """
    wrap_draws((*_PORTABLE, *_NOT_PORTABLE), _portable_where_asked)
    return step_with(drawing=_Drawing(name, inputs, unseeded))


def _portable_where_asked(kind: str, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    drawing = _running_draw()
    if drawing is not None and kind in _PORTABLE:
        return _PORTABLE[kind](*args, **kwargs)
    if drawing is not None:
        warnings.warn(
            f"{drawing.name} draws from keras.random.{kind}, which differs between backends, so training will differ",
            stacklevel=3,
        )
    return draw(*args, **kwargs)


def _for_rows(numbers: Draw, shape: tuple[Any, ...], seed: Any, tensor: Any = None) -> Any:
    """Draws the values of this replica's rows.

    Args:
        numbers: a function that draws the values of all rows.
        shape: the shape of the values.
        seed: see `bits`.
        tensor: see `bits`.
    """
    context = current()
    if context is None or context.rows is None or not shape:
        return numbers(shape, _state(seed), 0)
    order = _row_order(context, shape, seed, tensor)
    if order is None:
        return numbers(shape, _state(seed), 0)
    size = shape[0]
    if order is RowOrder.FIRST:
        return numbers(shape, _state(seed), context.first_row * (size // context.rows))
    # Rare: draws for the global batch, and selects this replica's rows.
    total_rows = context.total_rows or 0
    whole = (size // context.rows * total_rows, *shape[1:])
    indices = order.indices(size, context.rows, context.first_row, total_rows)
    return ops.take(numbers(whole, _state(seed), 0), indices, axis=0)


def _row_order(context: Any, shape: tuple[Any, ...], seed: Any, tensor: Any) -> RowOrder | None:
    name, inputs, _ = _running_draw() or _UNNAMED
    if tensor is None:  # an argument of the layer with the shape of the draws
        # Only now: on torch, `keras.tree.flatten` (3.15) leaves a reference cycle, which keeps the tensors in memory
        # until Python's garbage collector runs. In recomputed layers, these are the tensors that --remat is to save.
        alike = (leaf for leaf in keras.tree.flatten(inputs) if len(getattr(leaf, "shape", ())) == len(shape))
        tensor = next((leaf for leaf in alike if all(own in (1, of) for own, of in zip(shape, leaf.shape))), None)
    key = id(seed) if isinstance(seed, keras.random.SeedGenerator) else f"{name}, {seed if type(seed) is int else None}"
    return context.row_order(("draw", key), tensor, name, tuple(shape))


def _state(seed: Any) -> Any:
    """Returns two integers that seed a draw.

    Raises:
        UserError: if the seed is missing in a layer or step, or if the model does not hold the seed generator.
    """
    drawing = _running_draw()
    words = drawing.unseeded if drawing is not None and seed is None else None
    is_known = drawing is not None and (is_in_layer_call() or drawing.name == STEP)
    if seed is None and words is None and drawing is not None and is_known:
        raise UserError(
            f"{drawing.name} draws from keras.random without a seed, so the values would differ between backends, "
            "between devices and after a resume; store keras.random.SeedGenerator(0) in the model, and pass it as seed"
        )
    kept = current_step().kept
    if kept is not None and isinstance(seed, keras.random.SeedGenerator) and id(seed.state) not in kept:
        raise UserError(
            f"{_UNNAMED.name if drawing is None else drawing.name} draws with a SeedGenerator that the model does not "
            "hold, so each step would draw the same values on jax; make the generator an attribute of the model"
        )
    return next_seed(seed) if words is None else words()


def _unit(shape: Any, seed: Any, dtype: Any) -> Any:
    return _for_rows(_by(_uniform, keras.backend.standardize_dtype(dtype)), tuple(shape), seed)


def generators_of(objects: list[Any]) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Returns pairs of functions that get and set the state of random generators outside of Keras.

    These are the generators of Python's `random` and of NumPy, and the generators in attributes of `objects`. With
    torch, PyTorch's CPU generator is included.
    """
    own = [value for each in objects for value in vars(each).values()]
    found: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
    ]
    found += [(value.getstate, value.setstate) for value in own if isinstance(value, random.Random)]
    found += [(value.get_state, value.set_state) for value in own if isinstance(value, np.random.RandomState)]
    for bits in [value.bit_generator for value in own if isinstance(value, np.random.Generator)]:
        found.append((functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")))
    if keras.config.backend() == "torch":
        torch = importlib.import_module("torch")
        found.append(
            (lambda: torch.get_rng_state().numpy(), lambda state: torch.set_rng_state(torch.from_numpy(state)))
        )
    return found
