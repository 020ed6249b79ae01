"""Layers that see other rows than those of the batch: the same losses, or a refusal that names the layer."""

import functools

from tests.helpers import PROGRAMS, all_but, assert_same, each_way, result_of, run

QUICK = ("table", "windows", "noise without a seed", "mix", "ragged")
OTHERS = ("views", "time distributed", "activity", "noise of a fixed seed")
ELSEWHERE = ("time first", "time first outputs")
REFUSED = ("hidden noise without a seed", "mix of operations", "draws past Keras", "threes", *ELSEWHERE)
each_backend = all_but("jax", "tensorflow")


@functools.cache
def done(backend, num_devices=2, names=QUICK + REFUSED):
    return run(PROGRAMS / "row_axes.py", backend, num_devices, *names, backend=backend)


def trained(*way):
    return result_of(done(*way))


@each_way(
    QUICK + OTHERS,
    lambda backend, count, case: backend == "torch" and case in QUICK,
    counts=(2,),
    is_there=lambda backend, count, case: (backend, case) != ("jax", "ragged"),  # whose programs know all sizes
)
def test_rows_are_found_wherever_they_are(backend, count, case):
    names = [OTHERS] if case in OTHERS else []
    expected, received = (trained(*way, *names)[case] for way in (("torch", 1), (backend, count)))
    assert len(expected) == 4
    assert_same(expected, received, 1e-5)


@each_backend
def test_predictions_alone_are_those_of_the_whole_batch(backend):
    expected, received = trained("torch", 1)["predictions"], trained(backend)["predictions"]
    for name, words in {"mix of operations": "mixes the samples of a batch", "time first": "on axis 0"}.items():
        assert backend == "jax" or words in received.pop(name)
    for name, rows in received.items():
        assert_same(expected[name], rows, 1e-5)


@each_backend
def test_rows_that_are_not_on_axis_0_are_refused_where_that_matters(backend):
    """In draws, in statistics, and in outputs that are gathered; not in what layers do with each sample by itself."""
    for name in ELSEWHERE:
        received = trained(backend)[name]
        if backend == "jax":  # one program sees the whole batch
            assert_same(trained("torch", 1)[name], received, 1e-5)
            continue
        assert "expected the samples on axis 0. If samples are on another axis" in received
        assert received.endswith('or train on one device or with backend="jax"')


@each_backend
def test_what_mixes_rows_outside_of_layers_is_refused(backend):
    received = trained(backend)["mix of operations"]
    if backend == "jax":  # one program sees the whole batch
        assert_same(trained("torch", 1)["mix of operations"], received, 1e-5)
        return
    assert received.startswith(
        "mixes computes different values for a split batch than for the whole batch, first in layer flatten"
    )
    assert received.endswith('or ignore the difference with check="off"')


@each_backend
def test_what_draws_past_keras_is_named(backend):
    """Several devices refuse it; one device, and the one program of jax, train, each backend otherwise."""
    if backend != "jax":
        assert trained(backend)["draws past Keras"].startswith(
            "layer mask of draws computes different values each time for the same samples. Random numbers that"
        )
    line = "warning: layer mask of draws draws random numbers that are not from keras.random, so "
    assert done("torch", 1).stderr.count(line) == 1 and done(backend).stderr.count(line) == (backend == "jax")


def test_a_model_that_cannot_take_some_of_its_samples_is_refused():
    assert trained("torch")["threes"].startswith("thirds fails on 4 samples split over devices, in a trial before ")


@each_backend
def test_draws_that_cannot_be_given_a_seed_are_refused(backend):
    for found in (trained(backend), trained("torch", 1)):
        text = found["hidden noise without a seed"]
        assert "draws from keras.random without a seed, so the values would differ between backends" in text
