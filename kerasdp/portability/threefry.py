"""Makes random numbers out of a key and a place: the words of Threefry, and what is drawn with them.

The generator is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3;
SC 2011, doi:10.1145/2063384.2063405), in the int32 operations that torch, JAX and TensorFlow share: they wrap
around on all three, where unsigned ones are missing (torch 2.13: no shift of uint32).
"""

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA
# Bits of a uniform number: as many as float32 holds exactly, so that it is the same in every precision.
UNIFORM_BITS = 24


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


# Makes numbers of a shape from two arrays of words, each of shape `(entries of axis 0, half of the numbers of an
# entry)`, and what else it is told: values that can be hashed.
Maker = Callable[..., Any]


def draw(make: Maker, shape: tuple[Any, ...], state: Any, first: Any, *choices: Any) -> Any:
    """Draws a tensor.

    On TensorFlow this is one compiled function, from the key to what is made of the words. Between functions and
    operations words would be int32, which it (2.21) keeps in host memory on GPUs: of a mask all numbers would be made
    there.

    Args:
        make: of this module.
        shape: of the tensor.
        state: the key: a tensor of two whole numbers, or two int.
        first: index of the first entry of axis 0.
        *choices: that `make` takes.
    """
    if keras.backend.backend() == "tensorflow":
        state, first = ops.convert_to_tensor(state), ops.convert_to_tensor(first, "int32")
        return _compiled(make)(state, first, shape, choices)
    return _drawn(make, state, first, shape, choices)


@functools.cache
def _compiled(make: Maker) -> Callable[..., Any]:
    """Returns a function of its own for each maker: how it is compiled depends on shape and choices."""
    return importlib.import_module("kerasdp.backends.tensorflow.xla").compiled(functools.partial(_drawn, make))


def _drawn(make: Maker, state: Any, first: Any, shape: tuple[Any, ...], choices: tuple[Any, ...]) -> Any:
    # Also to the device of the counters: when Keras builds a model by its shapes, torch's are on the meta device.
    state = ops.convert_to_tensor(ops.cast(state, "int32"), "int32")
    entries, numbers = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    row = ops.expand_dims(ops.arange(entries, dtype="int32"), 1) + first
    column = ops.expand_dims(ops.arange((numbers + 1) // 2, dtype="int32"), 0)
    counter = row + ops.zeros_like(column), column + ops.zeros_like(row)
    return make(shape, *threefry((state[0], state[1]), counter), *choices)


def words(shape: tuple[Any, ...], x: Any, y: Any) -> Any:
    """Returns the words themselves."""
    return joined(shape, x, y)


def joined(shape: tuple[Any, ...], x: Any, y: Any) -> Any:
    """Returns a tensor of the shape, of two halves of the numbers of each entry."""
    return ops.reshape(ops.concatenate([x, y], axis=1)[:, : math.prod(shape[1:])], shape)


def mask(shape: tuple[Any, ...], x: Any, y: Any, dropped: int) -> Any:
    """Returns bools: False with a probability of `dropped / 2**UNIFORM_BITS`."""
    return _upper_bits(words(shape, x, y)) >= dropped


def uniform(shape: tuple[Any, ...], x: Any, y: Any, dtype: str) -> Any:
    """Returns exact numbers in [0, 1), in float64 if what is made of them is to be float64, else in float32."""
    return _unit(words(shape, x, y), dtype)


def two_uniforms(shape: tuple[Any, ...], x: Any, y: Any, dtype: str) -> tuple[Any, Any]:
    """Returns two arrays as `uniform` has them, of the words as they come: half of the numbers each."""
    return _unit(x, dtype), _unit(y, dtype)


def whole(shape: tuple[Any, ...], x: Any, y: Any) -> Any:
    """Returns whole numbers from 0 to `2**31 - 1`."""
    return ops.bitwise_and(words(shape, x, y), 0x7FFFFFFF)


def integers(shape: tuple[Any, ...], x: Any, y: Any, low: int, high: int, dtype: str) -> Any:
    """Returns whole numbers from `low` to `high - 1`."""
    return ops.cast(low + ops.mod(whole(shape, x, y), high - low), dtype)


def _upper_bits(drawn: Any) -> Any:
    """Returns the upper 24 bits, as numbers from 0."""
    return ops.bitwise_and(ops.right_shift(drawn, 32 - UNIFORM_BITS), (1 << UNIFORM_BITS) - 1)


def _unit(drawn: Any, dtype: Any) -> Any:
    wide = "float64" if keras.backend.standardize_dtype(dtype) == "float64" else "float32"
    return ops.cast(_upper_bits(drawn), wide) * 2.0**-UNIFORM_BITS
