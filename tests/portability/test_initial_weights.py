"""Weights drawn in NumPy have the distribution of Keras' own initializers."""

import itertools

import keras
import numpy as np
import pytest

from kerasdp.portability import initial_weights
from kerasdp.portability import random as random_numbers

KINDS = keras.initializers
SHAPES = [(200, 300), (3, 3, 40, 60)]
INITIALIZERS = [
    KINDS.GlorotUniform(), KINDS.GlorotNormal(), KINDS.HeNormal(), KINDS.HeUniform(), KINDS.LecunNormal(),
    KINDS.LecunUniform(), KINDS.VarianceScaling(2.0, "fan_out", "untruncated_normal"), KINDS.RandomNormal(0.3, 0.2),
    KINDS.TruncatedNormal(0.1, 0.5), KINDS.RandomUniform(-0.1, 0.4),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda initializer: type(initializer).__name__)
def test_distribution(initializer, shape):
    own = initial_weights.draw(initializer, shape, [0, 0])
    theirs = np.asarray(initializer(shape))
    assert own.shape == shape
    deviation = float(theirs.std())
    assert own.mean() == pytest.approx(float(theirs.mean()), abs=0.03 * deviation)
    assert own.std() == pytest.approx(deviation, rel=0.03)
    # The shape of the distribution, and where it is truncated.
    quantiles = [0.001, 0.05, 0.25, 0.75, 0.95, 0.999]
    np.testing.assert_allclose(np.quantile(own, quantiles), np.quantile(theirs, quantiles), atol=0.2 * deviation)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 3, 2, 5)])
def test_orthogonal(shape):
    values = initial_weights.draw(KINDS.Orthogonal(gain=2.0), shape, [1]).reshape(-1, shape[-1])
    small = values.T @ values if values.shape[0] >= values.shape[1] else values @ values.T
    np.testing.assert_allclose(small, 4 * np.eye(len(small)), atol=1e-12)


def test_the_draw_never_changes():
    # Golden: NumPy promises this stream.
    values = initial_weights.draw(KINDS.RandomNormal(0.0, 1.0), (3,), [0, 0])
    np.testing.assert_allclose(values, np.random.RandomState([0, 0]).normal(size=3), rtol=0, atol=0)


def build(seed):
    with initial_weights.portable(seed, itertools.count()):
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5),
                keras.layers.Dense(5, kernel_initializer=KINDS.GlorotUniform(seed=7)),
                keras.layers.Dense(5, kernel_initializer="ones", bias_initializer="random_normal"),
            ]
        ).get_weights()


def test_seed_and_place():
    first, again, other = build(0), build(0), build(1)
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(first[0], other[0])
    np.testing.assert_array_equal(first[2], other[2])  # an initializer with a seed of its own keeps to it
    assert not np.array_equal(first[0][:5], first[2])
    np.testing.assert_array_equal(first[1], 0)
    np.testing.assert_array_equal(first[4], 1)
    assert not np.array_equal(first[5], other[5])


def test_other_initializers_draw_portably():
    class Odd(KINDS.Initializer):
        seed = 0

        def __call__(self, shape, dtype=None, **_):
            return keras.random.uniform(shape, dtype=dtype, seed=3)

    with initial_weights.portable(0):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_initializer=Odd())])
    np.testing.assert_array_equal(model.get_weights()[0], random_numbers.uniform((2, 2), seed=3))


def test_random_layers_get_seeds():
    def seeds(seed):
        with initial_weights.portable(seed):
            layers = keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.5), keras.layers.Dropout(0.5, seed=3)
        return [int(keras.ops.convert_to_numpy(layer.seed_generator.state)[0]) for layer in layers]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 5
    assert seeds(0)[2] == 3


def test_layers_outside_are_left_alone():
    original = keras.layers.Layer.add_weight
    with pytest.raises(RuntimeError), initial_weights.portable(0):
        raise RuntimeError
    assert keras.layers.Layer.add_weight is original
