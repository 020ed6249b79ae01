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


PROGRAMS_OF_JAX = """
import jax, keras, kerasdp, numpy as np
def train(runner):
    class Own(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sin(x) * keras.ops.cumsum(x, -1) + keras.ops.sort(x, -1) * keras.ops.logaddexp(x, 1.0)
    made = []
    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), Own(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    jax.config.update("jax_enable_compilation_cache", False)
    def note(name, seconds, **of):
        if name.endswith("backend_compile_duration"):
            made.append(of.get("fun_name"))
    jax.monitoring.register_event_duration_secs_listener(note)
    runner.fit(model, np.ones((8, 4)), np.ones((8, 1)), batch_size=8, epochs=1)
    print("MADE", len(made), made)
kerasdp.launch(train, backend="jax", num_devices=1, device="cpu", verbose=0)
"""


@pytest.mark.proof
@pytest.mark.skipif("jax" not in BACKENDS, reason="jax is not installed")
def test_a_layer_is_asked_for_its_draws_without_compiling_its_operations():
    """On a GPU each that is compiled by itself takes as long as half a second."""
    made = run("-c", PROGRAMS_OF_JAX).stdout.partition("MADE ")[2]
    assert "train_step" in made
    assert not any(name in made for name in ("sin", "cumsum", "sort", "logaddexp")), made


@pytest.mark.parametrize("way", [way for way in WAYS if way.id == "torch"])
def test_a_model_that_cannot_take_some_of_its_samples_is_refused(way):
    assert trained(*way)["threes"].startswith("thirds fails on 4 samples, where each device has some of the batch ")


@pytest.mark.parametrize("way", WAYS)
def test_draws_that_cannot_be_given_a_seed_are_refused(way):
    for backend, num_devices in (way, ("torch", 1)):
        text = trained(backend, num_devices)["hidden noise without a seed"]
        assert "draws from keras.random without a seed, so its numbers differ between backends, devices" in text


@pytest.mark.parametrize("way", [way for way in WAYS if way.values[0][0] != "jax"])
def test_the_check_finds_other_masks_and_mixed_rows(way):
    """With the mend taken out: rows are taken to be on axis 0, as their number says."""
    found = trained(*way)["without the search"]
    assert len(found) == 4
    for name, text in found.items():
        assert "computes something else for some samples of a batch" in text, name
