"""Layers that see other rows than those of the batch: the same losses, or a refusal that names the layer."""

import functools

import pytest

from tests.helpers import BACKENDS, PROGRAMS, assert_same, result_of, run

NAMES = (
    "table", "views", "windows", "time first", "time distributed", "activity", "time first outputs",
    "noise of a fixed seed", "noise without a seed", "mix", "ragged",
)  # fmt: skip
WAYS = [
    pytest.param((backend, 2), marks=() if backend == "torch" else pytest.mark.proof, id=backend)
    for backend in BACKENDS
]


@functools.cache
def done(backend, num_devices):
    return run(PROGRAMS / "row_axes.py", backend, num_devices, backend=backend)


def trained(backend, num_devices):
    return result_of(done(backend, num_devices))


@pytest.mark.parametrize(
    ("way", "name"),
    # jax has no tensors whose size the data tells
    [pytest.param(*way.values, name, marks=way.marks, id=f"{way.id}-{name}") for way in WAYS for name in NAMES
     if (way.id, name) != ("jax", "ragged")],
)  # fmt: skip
def test_rows_are_found_wherever_they_are(way, name):
    expected, received = trained("torch", 1)[name], trained(*way)[name]
    assert len(expected) == 4
    assert_same(expected, received, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_predictions_alone_are_those_of_the_whole_batch(way):
    expected, received = trained("torch", 1)["predictions"], trained(*way)["predictions"]
    assert way[0] == "jax" or "mixes the samples of a batch" in received.pop("mix of operations")
    for name, rows in received.items():
        assert_same(expected[name], rows, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_what_mixes_rows_outside_of_layers_is_refused(way):
    received = trained(*way)["mix of operations"]
    if way[0] == "jax":  # one program sees the whole batch
        assert_same(trained("torch", 1)["mix of operations"], received, 1e-5)
        return
    assert received.startswith(
        "mixes computes something else for some samples of a batch than for all of it, first in layer flatten"
    )
    assert received.endswith('or, all the same, with check="off"')


@pytest.mark.parametrize("way", WAYS)
def test_what_draws_past_keras_is_named(way):
    """Several devices refuse it; one device, and the one program of jax, train, each backend otherwise."""
    if way[0] != "jax":
        assert trained(*way)["draws past Keras"].startswith(
            "layer mask of draws gives other numbers each time for the same samples: random numbers that are not from"
        )
    line = "warning: layer mask of draws draws random numbers that are not from keras.random: "
    for one in {("torch", 1), way}:
        assert done(*one).stderr.count(line) == (one[0] == "jax" or one[1] == 1)


@pytest.mark.parametrize("way", [way for way in WAYS if way.id == "torch"])
def test_a_model_that_cannot_take_some_of_its_samples_is_refused(way):
    assert trained(*way)["threes"].startswith("thirds fails on 4 samples, where each device has some of the batch ")


@pytest.mark.parametrize("way", WAYS)
def test_draws_that_cannot_be_given_a_seed_are_refused(way):
    for backend, num_devices in (way, ("torch", 1)):
        text = trained(backend, num_devices)["hidden noise without a seed"]
        assert "draws from keras.random without a seed, so its numbers differ between backends, devices" in text
