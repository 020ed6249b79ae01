"""Layers that see other rows than those of the batch: the same losses, or a refusal that names the layer."""

import functools

import pytest

from tests.helpers import PROGRAMS, all_but, assert_same, result_of, run

NAMES = (
    "table", "views", "windows", "time first", "time distributed", "activity", "time first outputs",
    "noise of a fixed seed", "noise without a seed", "mix", "ragged",
)  # fmt: skip
each_backend = all_but("jax", "tensorflow")


@functools.cache
def done(backend, num_devices=2):
    return run(PROGRAMS / "row_axes.py", backend, num_devices, backend=backend)


def trained(backend, num_devices=2):
    return result_of(done(backend, num_devices))


@each_backend
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_found_wherever_they_are(backend, name):
    expected, received = trained("torch", 1)[name], trained(backend)
    assert len(expected) == 4
    if (backend, name) == ("jax", "ragged"):  # it has no tensors whose size the data tells
        assert name not in received
    else:
        assert_same(expected, received[name], 1e-5)


@each_backend
def test_predictions_alone_are_those_of_the_whole_batch(backend):
    expected, received = trained("torch", 1)["predictions"], trained(backend)["predictions"]
    assert backend == "jax" or "mixes the samples of a batch" in received.pop("mix of operations")
    for name, rows in received.items():
        assert_same(expected[name], rows, 1e-5)


@each_backend
def test_what_mixes_rows_outside_of_layers_is_refused(backend):
    received = trained(backend)["mix of operations"]
    if backend == "jax":  # one program sees the whole batch
        assert_same(trained("torch", 1)["mix of operations"], received, 1e-5)
        return
    assert received.startswith(
        "mixes computes something else for some samples of a batch than for all of it, first in layer flatten"
    )
    assert received.endswith('or, all the same, with check="off"')


@each_backend
def test_what_draws_past_keras_is_named(backend):
    """Several devices refuse it; one device, and the one program of jax, train, each backend otherwise."""
    if backend != "jax":
        assert trained(backend)["draws past Keras"].startswith(
            "layer mask of draws gives other numbers each time for the same samples: random numbers that are not from"
        )
    line = "warning: layer mask of draws draws random numbers that are not from keras.random: "
    assert done("torch", 1).stderr.count(line) == 1 and done(backend).stderr.count(line) == (backend == "jax")


def test_a_model_that_cannot_take_some_of_its_samples_is_refused():
    assert trained("torch")["threes"].startswith("thirds fails on 4 samples, where each device has some of the batch ")


@each_backend
def test_draws_that_cannot_be_given_a_seed_are_refused(backend):
    for found in (trained(backend), trained("torch", 1)):
        text = found["hidden noise without a seed"]
        assert "draws from keras.random without a seed, so its numbers differ between backends, devices" in text
