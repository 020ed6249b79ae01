"""Draws initial weights that depend only on the seed and on the position of the variable in the model.

Keras draws initial weights with the random generator of its backend, so the same seed produces different weights on
each backend. Here NumPy draws the weights, from the distribution of the layer's initializer.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from kerasdp.keras_compat.layers import is_of_keras
from kerasdp.keras_compat.patches import current_step, replaced, step_with
from kerasdp.keras_compat.random import creating_weights, fans_of, has_drawn_seed, seed_of
from kerasdp.same import random as random_numbers

# The standard deviation of a standard normal distribution that is truncated at two; Keras divides by it.
_TRUNCATED_STDDEV = 0.87962566103423978

# A key is `[seed, place]` for a weight, or `[user's seed]`. All other keys end with one of these numbers.
_FUNCTION, _OUTSIDE, _UNSEEDED, _WITHIN, _GENERATOR, _DEFAULT_SEED = range(6)


class _Weight(NamedTuple):
    """Describes a weight whose initial values are being drawn.

    Attributes:
        initializer: the initializer of the weight.
        key: the integers that seed the draw of the initial values.
        key_within: the first integers of the seed of nested draws. Nested draws are draws that the initializer makes
            through `keras.random` or a second initializer.
        indices: numbers the nested draws.
    """

    initializer: Any
    key: list[int]
    key_within: list[int]
    indices: Iterator[int]


class WeightNumbering:
    """Numbers random weights and seed generators from 0, in the order of their creation.

    An initializer with a seed keeps that seed. An initializer without a seed uses one seed for all its weights, as in
    Keras. In this class, that seed comes from the number of the initializer's first weight.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.restart()

    def restart(self) -> None:
        """Restarts the numbering at 0, and forgets the seeds of all initializers."""
        self._indices = itertools.count()
        # Counted separately: a model's weights must not depend on draws of other code.
        self._counts = {kind: itertools.count() for kind in (_FUNCTION, _OUTSIDE, _UNSEEDED, _DEFAULT_SEED)}
        # By `id`, together with the object: while it is alive, no other object gets its `id`.
        self._first_keys: dict[int, tuple[Any, list[int]]] = {}
        self._uses: dict[int, tuple[Any, Iterator[int]]] = {}

    def replace_initializer(self, initializer: Any, layer: keras.layers.Layer) -> Callable[..., Any]:
        """Returns a function that draws the initial values of a new weight of a layer.

        For a constant initializer of Keras, returns the initializer itself.
        """
        if hasattr(initializer, "seed"):
            place = [self.seed, next(self._indices)]
            source = _copied_from(initializer, layer)
            key = self._key_of(source, place)
            # Keras 3.15 draws a seed at random when the initializer is made, before it is known which weight it draws.
            seed = {"seed": _whole_number(key)} if has_drawn_seed(source) else {}
        elif is_of_keras(type(initializer)):  # constants
            return initializer
        else:
            place = key = self._next_key(_FUNCTION)
            seed = {}
        within = _Weight(initializer, key, place, itertools.count())

        def draw_values(shape: Any, dtype: Any = None, **_: Any) -> Any:
            # Keras draws a weight that is made in a trace a second time: both draws must be the same.
            weight = within._replace(indices=itertools.count())
            with step_with(weight=weight), self.portable_draws(), replaced(initializer, **seed):
                return initializer(shape, dtype=dtype)

        return draw_values

    def draw(self, initializer: Any, shape: Any, dtype: str) -> Any:
        """Draws the values that a random initializer of Keras returns to `add_weight` or to any other caller."""
        weight = current_step().weight
        if weight is None:
            key = self._key_of(initializer, self._next_key(_OUTSIDE))
        elif weight.initializer is initializer:
            key = weight.key
        else:  # called by the weight's initializer
            key = self._key_of(initializer, [*weight.key_within, next(weight.indices), _WITHIN])
        return keras.ops.convert_to_tensor(draw(initializer, tuple(shape), key).astype("float32"), dtype=dtype)

    def make_seed(self) -> int:
        """Returns a seed for a `SeedGenerator` that was created without a seed."""
        return _whole_number([self.seed, next(self._indices)])

    def make_default_seed(self) -> int:
        """Returns a seed for cases in which Keras would draw the seed from Python's `random`."""
        return _whole_number(self._next_key(_DEFAULT_SEED))

    def portable_draws(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which `keras.random` draws the same on all backends, also in custom initializers."""
        return random_numbers.portable_draws(random_numbers.INITIALIZER, unseeded=self._unseeded_words)

    def _unseeded_words(self) -> tuple[int, int]:
        weight = current_step().weight
        key = self._next_key(_UNSEEDED) if weight is None else [*weight.key_within, next(weight.indices), _UNSEEDED]
        first, second = np.random.RandomState(key).randint(-(2**31), 2**31 - 1, 2)
        return int(first), int(second)

    def _next_key(self, kind: int) -> list[int]:
        return [self.seed, next(self._counts[kind]), kind]

    def _key_of(self, initializer: Any, place: list[int]) -> list[int]:
        """Returns the integers that seed a draw.

        They come from the seed of the initializer. Without a seed they are the `place` of the first draw.
        """
        seed = seed_of(initializer)
        if isinstance(seed, keras.random.SeedGenerator):
            own = seed.get_config()["seed"]
            first = self._first_key(seed, place) if own is None else [_word(own)]
            _, uses = self._uses.setdefault(id(seed), (seed, itertools.count()))
            return [*first, next(uses), _GENERATOR]
        return [_word(seed)] if isinstance(seed, int) else self._first_key(initializer, place)

    def _first_key(self, source: Any, place: list[int]) -> list[int]:
        return self._first_keys.setdefault(id(source), (source, place))[1]


@contextlib.contextmanager
def portable(seed: int, numbering: WeightNumbering | None = None) -> Iterator[None]:
    """Makes new random weights, and the seeds of new random layers, depend only on `seed` within the context.

    An initializer or a layer with a seed keeps that seed, as in Keras. This context sets only the initial value of a
    new variable. So weights that are loaded later, such as pretrained weights, do not change.

    Args:
        seed: the run's seed.
        numbering: the numbering to continue. None: a new numbering.
    """
    numbering = WeightNumbering(seed) if numbering is None else numbering
    with creating_weights(numbering), numbering.portable_draws():
        yield


def _copied_from(initializer: Any, layer: keras.layers.Layer) -> Any:
    """Returns the original of `initializer`, if a layer copied that original for a weight; else `initializer` itself.

    In Keras 3.15, `EinsumDense` copies its initializer together with the random seed that Keras drew for the
    initializer. In the copy, that seed looks like a seed from the user.
    """
    for other in vars(layer).values():
        if isinstance(other, type(initializer)) and has_drawn_seed(other) and other.seed == seed_of(initializer):
            return other
    return initializer


def _whole_number(key: list[int]) -> int:
    return int(np.random.RandomState(key).randint(2**31 - 1))


def _word(seed: int) -> int:
    return seed % 2**32


def draw(initializer: Any, shape: tuple[int, ...], key: list[int]) -> np.ndarray:
    """Draws an array from the distribution of a Keras initializer.

    The function uses `numpy.random.RandomState`, because NumPy promises never to change the random streams of that
    class (NEP 19).

    Args:
        initializer: a random initializer of `keras.initializers`.
        shape: the shape of the array.
        key: integers from 0 to 2**32 - 1 that seed the draw.

    Returns:
        A float64 array of that shape.
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
    return initializer.gain * _orthogonal(shape, random)


def _variance_scaling(initializer: Any, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    fan_in, fan_out = fans_of(initializer, shape)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[initializer.mode]
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return random.uniform(-limit, limit, shape)
    if initializer.distribution == "untruncated_normal":
        return random.normal(0.0, math.sqrt(variance), shape)
    return math.sqrt(variance) / _TRUNCATED_STDDEV * _truncated_normal(shape, random)


def _truncated_normal(shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Draws standard normal values, and draws values beyond two standard deviations again."""
    values = random.standard_normal(shape)
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = random.standard_normal(int(outside.sum()))
    return values


def _orthogonal(shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    """Draws a matrix with orthonormal rows or columns: the Q of a QR decomposition with unique signs.

    See Saxe et al. 2014, arXiv:1312.6120.
    """
    if len(shape) < 2:
        raise ValueError(f"Orthogonal: expected at least two axes. Received: shape {shape}; use another initializer")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    q, r = np.linalg.qr(random.standard_normal((max(rows, columns), min(rows, columns))))
    q *= np.sign(np.diag(r))
    return (q.T if rows < columns else q).reshape(shape)
