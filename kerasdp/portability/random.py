"""Draws random numbers that are the same on every backend and device count: functions of seed, step and sample.

Keras draws with its backend's own generator, so that dropout differs from backend to backend, and every replica draws
the same numbers for its shard of the batch. Here a counter-based generator is asked for "number `j` of sample `i`",
where `i` is the sample's row in the GLOBAL batch: a replica that holds samples 32 to 63 draws what one device
would draw for them.

The generator is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3;
SC 2011, doi:10.1145/2063384.2063405), in the int32 operations that torch, JAX and TensorFlow share: they wrap
around on all three, where unsigned ones are missing (torch 2.13: no shift of uint32).
"""

import contextlib
import contextvars
import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from kerasdp.keras_compat import next_seed, wrap_draws
from kerasdp.portability import replica_context

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA
# Bits of a uniform number: as many as float32 holds exactly, so that it is the same in every precision.
_UNIFORM_BITS = 24


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns two words of random bits for each counter, by Threefry-2x32-20.

    Args:
        key: two int32 tensors that broadcast with the counter: the bits of unsigned words.
        counter: two int32 tensors of one shape.

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
    # The right shift of a signed number fills up with its sign, which is cut away.
    right = ops.bitwise_and(ops.right_shift(word, 32 - distance), (1 << distance) - 1)
    return ops.bitwise_or(ops.left_shift(word, distance), right)


def bits(shape: tuple[Any, ...], seed: Any, *, for_each_sample: bool = True) -> Any:
    """Draws random words for a tensor of a batch.

    Args:
        shape: of the words. If its first axis counts the replica's samples, each sample's words depend on its row in
            the global batch, else all replicas draw the same.
        seed: a `keras.random.SeedGenerator`, which is advanced, or an int, or a pair of words.
        for_each_sample: False: all replicas draw the same, whatever the shape.

    Returns:
        Int32 tensor of that shape; all 32 bits of each number are random.
    """
    return _for_shape(shape, *_blocks(shape, seed, for_each_sample))


def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
    """Drops units, as `keras.random.dropout`. The mask is bit-equal everywhere; see `bits` for the seed.

    `noise_shape`: None in it stands for the axis of the inputs. On its first axis everything but 1 means a mask for
    each sample.
    """
    shape = list(ops.shape(inputs))
    for axis, size in enumerate(noise_shape or ()):
        if size is not None and (axis > 0 or size == 1):
            shape[axis] = size
    dropped = round(rate * 2**_UNIFORM_BITS)
    one_for_all = bool(noise_shape) and noise_shape[0] == 1
    keep = _uniform_words(bits(tuple(shape), seed, for_each_sample=not one_for_all)) >= dropped
    scale = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
    return ops.where(keep, inputs * ops.cast(scale, inputs.dtype), ops.zeros((), dtype=inputs.dtype))


def uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    """Draws as `keras.random.uniform`, in steps of `(maxval - minval) / 2**24`; see `bits` for shape and seed."""
    numbers = _unit(bits(tuple(shape), seed))
    if not (isinstance(minval, (int, float)) and isinstance(maxval, (int, float)) and (minval, maxval) == (0, 1)):
        numbers = minval + numbers * (maxval - minval)
    return ops.cast(numbers, dtype or keras.config.floatx())


def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    """Draws as `keras.random.normal`, by Box and Muller (1958), equal up to round-off; see `bits` for the arguments."""
    shape = tuple(shape)
    x, y = _blocks(shape, seed)
    radius = ops.sqrt(-2.0 * ops.log(_unit(x) + 2.0**-_UNIFORM_BITS))  # of a number in (0, 1]
    angle = 2.0 * math.pi * _unit(y)
    numbers = _for_shape(shape, radius * ops.cos(angle), radius * ops.sin(angle))
    return ops.cast(mean + stddev * numbers, dtype or keras.config.floatx())


def truncated_normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    """Draws as `keras.random.truncated_normal`, by the inverse of the distribution function."""
    centred = 2.0 * _unit(bits(tuple(shape), seed)) + (2.0**-_UNIFORM_BITS - 1.0)
    numbers = math.sqrt(2.0) * ops.erfinv(math.erf(math.sqrt(2.0)) * centred)
    return ops.cast(mean + stddev * numbers, dtype or keras.config.floatx())


def randint(shape: Any, minval: Any, maxval: Any, dtype: str = "int32", seed: Any = None) -> Any:
    """Draws as `keras.random.randint`; see `bits` for shape and seed."""
    minval, maxval = (ops.cast(value, "int32") for value in (minval, maxval))
    words = ops.bitwise_and(bits(tuple(shape), seed), 0x7FFFFFFF)
    return ops.cast(minval + ops.mod(words, maxval - minval), dtype)


_PORTABLE = {function.__name__: function for function in (dropout, uniform, normal, truncated_normal, randint)}
_NOT_PORTABLE = ("beta", "binomial", "categorical", "gamma", "shuffle")
# A context variable, not functions that are swapped and restored: TensorFlow traces replicas in threads, in turns.
_drawing_layer: contextvars.ContextVar[str | None] = contextvars.ContextVar("kerasdp_drawing_layer", default=None)
_unseeded_words: contextvars.ContextVar[Callable[[], tuple[int, int]] | None] = contextvars.ContextVar(
    "kerasdp_unseeded_words", default=None
)


@contextlib.contextmanager
def portable_draws(name: str | None, unseeded_words: Callable[[], tuple[int, int]] | None = None) -> Iterator[None]:
    """Lets this module draw all that Keras' layers and `keras.random` draw within the context.

    What it does not know is drawn by the backend, with a warning that names the layer `name`.

    Args:
        name: of the layer. None: the backend draws everything, without a warning.
        unseeded_words: gives two int32 to draw with where no seed is given. None: Keras' global generator does.
    """
    wrap_draws((*_PORTABLE, *_NOT_PORTABLE), _portable_where_asked)
    token, words_token = _drawing_layer.set(name), _unseeded_words.set(unseeded_words)
    try:
        yield
    finally:
        _drawing_layer.reset(token)
        _unseeded_words.reset(words_token)


def _portable_where_asked(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        name = _drawing_layer.get()
        if name is not None and kind in _PORTABLE:
            return _PORTABLE[kind](*args, **kwargs)
        if name is not None:
            warnings.warn(
                f"layer {name} draws from keras.random.{kind}, which differs from backend to backend: so will the "
                "training",
                stacklevel=2,
            )
        return original(*args, **kwargs)

    return draw


def _blocks(shape: tuple[Any, ...], seed: Any, for_each_sample: bool = True) -> tuple[Any, Any]:
    """Draws two arrays of words, each of shape `(rows, half of the numbers of a sample)`."""
    words = _unseeded_words.get() if seed is None else None
    # Also to the device of the counters: when Keras builds a model by its shapes, torch's are on the meta device.
    state = ops.convert_to_tensor(ops.cast(next_seed(seed), "int32") if words is None else words(), "int32")
    rows, per_sample = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    context = replica_context.current()
    first_row = 0
    if for_each_sample and context is not None and isinstance(rows, int) and rows == context.rows:
        first_row = context.first_row
    row = ops.expand_dims(ops.arange(rows, dtype="int32"), 1) + first_row
    column = ops.expand_dims(ops.arange((per_sample + 1) // 2, dtype="int32"), 0)
    counter = row + ops.zeros_like(column), column + ops.zeros_like(row)
    draw = _threefry_as_one() if keras.backend.backend() == "tensorflow" else threefry
    return draw((state[0], state[1]), counter)


@functools.cache
def _threefry_as_one() -> Callable[..., Any]:
    return importlib.import_module("kerasdp.backends.tensorflow.xla").compiled(threefry)


def _for_shape(shape: tuple[Any, ...], x: Any, y: Any) -> Any:
    per_sample = math.prod(shape[1:])
    return ops.reshape(ops.concatenate([x, y], axis=1)[:, :per_sample], shape)


def _uniform_words(words: Any) -> Any:
    """Returns the upper 24 bits, as numbers from 0."""
    return ops.bitwise_and(ops.right_shift(words, 32 - _UNIFORM_BITS), (1 << _UNIFORM_BITS) - 1)


def _unit(words: Any) -> Any:
    """Returns exact float32 numbers in [0, 1)."""
    return ops.cast(_uniform_words(words), "float32") * 2.0**-_UNIFORM_BITS
