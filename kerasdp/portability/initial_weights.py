"""Draws initial weights that depend on the seed and on a variable's place in the model, and on nothing else.

Keras draws initial weights with its backend's random numbers, so the same seed gives different weights on each backend.
Here they are drawn in NumPy, from the distribution of the layer's own initializer.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.keras_compat import creating_weights, seed_of
from kerasdp.portability import random as random_numbers

# The spread that a unit normal keeps without everything beyond two deviations; Keras divides by it.
_TRUNCATED_STDDEV = 0.87962566103423978


@contextlib.contextmanager
def portable(seed: int, indices: Iterator[int] | None = None) -> Iterator[None]:
    """Makes every random weight that a layer creates, and the seed of every random layer, depend on `seed` alone.

    An initializer or a layer with a seed of its own keeps to that seed, as in Keras. Weights that are loaded later
    (a pretrained model) are not touched: only the first value of a new variable is drawn here.

    Args:
        seed: the run's seed.
        indices: numbers the random variables and the seed generators in the order in which they are created.
    """
    indices = itertools.count() if indices is None else indices

    def in_numpy(initializer: keras.initializers.Initializer) -> Callable[..., Any]:
        return _in_numpy(initializer, seed, next(indices))

    def make_seed() -> int:
        return int(np.random.RandomState([seed, next(indices)]).randint(2**31 - 1))

    # For user-defined initializers: what they draw from keras.random.
    with creating_weights(in_numpy, make_seed), random_numbers.portable_draws("of initial weights"):
        yield


def _in_numpy(initializer: Any, seed: int, place: int) -> Callable[..., Any]:
    own_seed = seed_of(initializer)
    key = [seed, place] if own_seed is None else [own_seed]

    def draw_values(shape: Any, dtype: Any = None, **_: Any) -> Any:
        values = draw(initializer, tuple(shape), key)
        if values is None:
            return initializer(shape, dtype=dtype)
        return keras.ops.convert_to_tensor(values.astype("float32"), dtype=dtype)

    return draw_values


def draw(initializer: Any, shape: tuple[int, ...], key: list[int]) -> np.ndarray | None:
    """Draws from the distribution of a Keras initializer.

    `numpy.random.RandomState` is used because NumPy promises never to change its streams (NEP 19).

    Args:
        initializer: one of the random `keras.initializers`.
        shape: of the array to draw.
        key: whole numbers from 0 to 2**32 - 1 that seed the draw.

    Returns:
        Float64 array of that shape, or None for an initializer of an unknown kind.
    """
    random = np.random.RandomState(key)
    kinds = keras.initializers
    if isinstance(initializer, kinds.VarianceScaling):
        return _variance_scaling(initializer, shape, random)
    if isinstance(initializer, kinds.RandomNormal):
        return random.normal(initializer.mean, initializer.stddev, shape)
    if isinstance(initializer, kinds.TruncatedNormal):
        return initializer.mean + initializer.stddev * _truncated_normal(shape, random)
    if isinstance(initializer, kinds.RandomUniform):
        return random.uniform(initializer.minval, initializer.maxval, shape)
    if isinstance(initializer, kinds.Orthogonal):
        return initializer.gain * _orthogonal(shape, random)
    return None


def _variance_scaling(initializer: Any, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    fan_in, fan_out = _fans(shape)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[initializer.mode]
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return random.uniform(-limit, limit, shape)
    if initializer.distribution == "untruncated_normal":
        return random.normal(0.0, math.sqrt(variance), shape)
    return math.sqrt(variance) / _TRUNCATED_STDDEV * _truncated_normal(shape, random)


def _fans(shape: tuple[int, ...]) -> tuple[float, float]:
    """Counts inputs and outputs of a kernel as Keras does (keras/src/initializers/random_initializers.py)."""
    if len(shape) < 2:
        size = shape[0] if shape else 1
        return size, size
    field = math.prod(shape[:-2])
    return field * shape[-2], field * shape[-1]


def _truncated_normal(shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Draws unit normal values, those beyond two deviations drawn again."""
    values = random.standard_normal(shape)
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = random.standard_normal(int(outside.sum()))
    return values


def _orthogonal(shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Draws the Q of a QR decomposition with unique signs (Saxe et al. 2014, arXiv:1312.6120)."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    q, r = np.linalg.qr(random.standard_normal((max(rows, columns), min(rows, columns))))
    q *= np.sign(np.diag(r))
    return (q.T if rows < columns else q).reshape(shape)
