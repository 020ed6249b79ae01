"""Every layer's weights are those of plain Keras in kind, and bit-equal on all backends, whatever was made before."""

import pytest

from tests import helpers
from tests.programs import keras_layers

pytestmark = pytest.mark.proof  # in short, on models: test_initial_weights.py

# Sines of the backend.
NOT_BIT_EQUAL = {"STFTSpectrogram"}
# Both are drawn with fixed seeds: it does not fail by chance.
STANDARD_ERRORS = 5
MOST_BEYOND = 30  # by chance: one in 2**30


def compared():
    return helpers.results("layer_weights.py", helpers.BACKENDS[0], "compare")


def others(names):
    return [helpers.results("layer_weights.py", backend) for backend in names]


def judge(name, weights):
    """Asserts that weights are in kind those of plain Keras."""
    for weight in weights:
        assert weight["is"] == weight["plain"]["is"]
        if "distance" in weight:
            distance = weight["distance"]
            assert distance["size"] >= 500, f"{name}: make it larger, so that it can be judged"
            assert distance["mean"] < STANDARD_ERRORS, (name, weight)
            assert distance["spread"] < STANDARD_ERRORS, (name, weight)
            assert distance["beyond"] < MOST_BEYOND, (name, weight)


def test_every_class_is_listed():
    assert not compared()["unlisted"], "new in Keras: see tests/programs/keras_layers.py"


@pytest.mark.parametrize("name", keras_layers.LAYERS)
def test_weights_are_those_of_plain_keras_in_kind(name):
    weights = compared()["layers"][name]
    assert weights
    judge(name, weights)


def test_most_layers_draw_at_random():
    drawn = [name for name, weights in compared()["layers"].items() if any("distance" in weight for weight in weights)]
    assert len(drawn) >= 30


each_way = pytest.mark.parametrize("names", [helpers.BACKENDS[2:], helpers.BACKENDS[1:2]], ids=str)


@each_way
@pytest.mark.parametrize("name", keras_layers.LAYERS)
def test_weights_are_bit_equal_on_all_backends(name, names):
    expected = compared()["layers"][name]
    for found in others(names):
        received = found["layers"][name]
        assert [weight["is"] for weight in received] == [weight["is"] for weight in expected]
        if name not in NOT_BIT_EQUAL:
            assert [weight["digest"] for weight in received] == [weight["digest"] for weight in expected]


@each_way
def test_models_are_bit_equal_however_they_are_built(names):
    results = [found["models"] for found in (compared(), *others(names))]
    expected = results[0]["called"]
    assert len(expected) > 20
    for result in results:
        for how, digests in result.items():
            assert digests == expected, how
