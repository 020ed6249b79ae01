"""Weights drawn in NumPy have the distribution of Keras' own initializers."""

import random

import keras
import numpy as np
import pytest

from kerasdp.same import initial_weights

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
    theirs = np.asarray(type(initializer)(**initializer.get_config() | {"seed": 0})(shape))
    assert own.shape == shape
    deviation = float(theirs.std())
    assert own.mean() == pytest.approx(float(theirs.mean()), abs=0.03 * deviation)
    assert own.std() == pytest.approx(deviation, rel=0.03)
    # The shape of the distribution, and where it is truncated.
    quantiles = [0.001, 0.05, 0.25, 0.75, 0.95, 0.999]
    np.testing.assert_allclose(np.quantile(own, quantiles), np.quantile(theirs, quantiles), atol=0.2 * deviation)


@pytest.mark.parametrize(("inputs", "outputs"), [([0], [1, 2]), ([0, 1], [2]), ([2], [0]), (None, [1])])
def test_fans_of_given_axes(inputs, outputs):
    initializer = KINDS.GlorotUniform(input_axes=inputs, output_axes=outputs)
    own, theirs = initial_weights.draw(initializer, (64, 8, 32), [0]), np.asarray(initializer((64, 8, 32)))
    assert np.abs(own).max() == pytest.approx(np.abs(theirs).max(), rel=1e-3)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 3, 2, 5)])
def test_orthogonal(shape):
    values = initial_weights.draw(KINDS.Orthogonal(gain=2.0), shape, [1]).reshape(-1, shape[-1])
    small = values.T @ values if values.shape[0] >= values.shape[1] else values @ values.T
    np.testing.assert_allclose(small, 4 * np.eye(len(small)), atol=1e-12)


def test_orthogonal_needs_a_matrix():
    with initial_weights.portable(0), pytest.raises(ValueError, match="at least two"):
        keras.layers.Dense(3, bias_initializer="orthogonal").build((None, 4))


def test_the_draw_never_changes():
    # Golden: NumPy promises this stream.
    values = initial_weights.draw(KINDS.RandomNormal(0.0, 1.0), (3,), [0, 0])
    np.testing.assert_allclose(values, np.random.RandomState([0, 0]).normal(size=3), rtol=0, atol=0)


def values_of(*layers, seed=0, shape=(None, 6)):
    """First weights of layers that are built in a scope, whatever Python's `random` did before."""
    with initial_weights.portable(seed):
        built = [layer() for layer in layers]
        for layer in built:
            layer.build(shape)
    return [keras.ops.convert_to_numpy(layer.weights[0]) for layer in built]


def dense(initializer):
    return lambda: keras.layers.Dense(6, kernel_initializer=initializer)


def einsum(initializer):
    return lambda: keras.layers.EinsumDense("ab,bc->ac", 6, kernel_initializer=initializer)


class Doubled(KINDS.RandomNormal):
    """Does with Keras' draw what it likes."""

    def __call__(self, shape, dtype=None):
        return 2 * super().__call__(shape, dtype=dtype)


class Hand(KINDS.VarianceScaling):
    """Draws by itself, with the seed it has."""

    def __call__(self, shape, dtype=None):
        return keras.random.uniform(shape, dtype=dtype, seed=self.seed)


def by_function(shape, dtype=None):
    return KINDS.HeNormal()(shape, dtype) + keras.random.normal(shape, dtype=dtype)


IDENTIFIERS = {
    "string": lambda: "he_normal",
    "config": lambda: {"class_name": "RandomNormal", "config": {"stddev": 0.1}},
    "object": KINDS.GlorotUniform,
    "clone": lambda: KINDS.GlorotUniform().clone(),
    "deserialized": lambda: keras.initializers.deserialize(keras.initializers.serialize(KINDS.HeUniform())),
    "truncated": KINDS.TruncatedNormal,
    "uniform": KINDS.RandomUniform,
    "orthogonal": KINDS.Orthogonal,
    "overridden": Doubled,
    "user-defined": Hand,
    "function": lambda: by_function,
    "unseeded generator": lambda: KINDS.HeNormal(seed=keras.random.SeedGenerator()),
}


@pytest.mark.parametrize("layer", [dense, einsum])
@pytest.mark.parametrize("kind", IDENTIFIERS)
def test_a_scope_does_not_depend_on_what_was_before(kind, layer):
    results = []
    for number in range(2):
        random.seed(number)
        keras.utils.set_random_seed(number)
        identifiers = IDENTIFIERS[kind](), IDENTIFIERS[kind]()  # made before the scope
        results.append(values_of(*(layer(identifier) for identifier in identifiers)))
        other_seed = values_of(layer(IDENTIFIERS[kind]()), seed=1)
        assert not np.array_equal(other_seed[0], results[-1][0])
    np.testing.assert_array_equal(*results)
    assert not np.array_equal(*results[0])  # two layers, two initializers


@pytest.mark.parametrize("layer", [dense, einsum])
@pytest.mark.parametrize("kind", ["object", "overridden", "user-defined"])
def test_a_shared_initializer_repeats_itself_as_in_keras(kind, layer):
    shared = IDENTIFIERS[kind]()
    one, other, third = values_of(layer(shared), layer(shared), layer(IDENTIFIERS[kind]()))
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, third)
    plain = [made() for made in (layer(shared), layer(shared))]
    for made in plain:
        made.build((None, 6))
    np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(made.weights[0]) for made in plain))


@pytest.mark.parametrize("layer", [dense, einsum])
@pytest.mark.parametrize("seed", [7, 0, -3, 2**40])
def test_the_users_seed_counts(layer, seed):
    def made():
        return layer(KINDS.HeNormal(seed=seed))

    one, other = values_of(made(), made())
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(one, values_of(made(), seed=1)[0])
    assert not np.array_equal(one, values_of(layer(KINDS.HeNormal(seed=8)))[0])


@pytest.mark.parametrize("layer", [dense, einsum])
def test_a_seed_generator_advances_with_each_weight(layer):
    def made(seed=7):
        initializer = KINDS.HeNormal(seed=keras.random.SeedGenerator(seed))
        return [layer(initializer), layer(initializer)]

    one, other = values_of(*made())
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal([one, other], values_of(*made(), seed=1))
    assert not np.array_equal(one, values_of(*made(8))[0])
    assert not np.array_equal(one, values_of(layer("he_normal"), seed=7)[0])


def test_what_is_drawn_beside_weights_does_not_depend_on_what_was_before():
    def drawn():
        with initial_weights.portable(0):
            return [
                keras.ops.convert_to_numpy(keras.random.normal((3,))),
                keras.ops.convert_to_numpy(KINDS.HeNormal()((3, 3)))[0],
                np.asarray([keras.layers.RandomCrop(2, 2).seed, KINDS.HeNormal().seed, 0]),
            ]

    first = drawn()
    keras.random.normal((1,))
    np.testing.assert_array_equal(first, drawn())


def test_of_nested_scopes_the_innermost_counts():
    with initial_weights.portable(1):
        inner = values_of(dense(by_function), dense("he_normal"))
        made = keras.layers.Dense(6)
        made.build((None, 6))
    np.testing.assert_array_equal(inner, values_of(dense(by_function), dense("he_normal")))
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(made.kernel), values_of(dense("glorot_uniform"), seed=1)[0]
    )


def test_random_layers_get_seeds():
    def seeds(seed):
        with initial_weights.portable(seed):
            layers = keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.5), keras.layers.Dropout(0.5, seed=3)
        return [int(keras.ops.convert_to_numpy(layer.seed_generator.state)[0]) for layer in layers]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 5
    assert seeds(0)[2] == 3
