"""Models and data of the user's own: they work as in Keras, or are refused with a way out."""

import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

# In the default suite, where nothing is compiled.
FEW = [(BACKENDS[0], count) for count in (1, 2)]
ALL = [(backend, count) for backend in BACKENDS for count in (1, 2)]


@pytest.fixture(
    scope="module", params=[pytest.param(FEW, id="few"), pytest.param(ALL, marks=pytest.mark.proof, id="all")]
)
def outcomes(request):
    """What each backend gives, by the number of its devices."""
    return {way: result_of(run(PROGRAMS / "own_code.py", *way, backend=way[0])) for way in request.param}


def numbers_of(outcomes, case):
    return {key: part[case] for key, part in outcomes.items() if not isinstance(part[case], str)}


def assert_all_equal(numbers):
    expected = next(iter(numbers.values()))
    for received in numbers.values():
        np.testing.assert_allclose(received, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "case", ["recompiled", "plain", "layer_made_before", "own_train_step", "add_loss", "batches", "own_batch_norm"]
)
def test_always_works(outcomes, case):
    numbers = numbers_of(outcomes, case)
    assert numbers.keys() == outcomes.keys()
    assert_all_equal(numbers)


def test_a_loss_that_keeps_a_variable_is_refused_where_it_would_be_lost(outcomes):
    for (backend, count), found in {key: part["own_loss"] for key, part in outcomes.items()}.items():
        is_lost = backend == "jax" or count > 1
        assert isinstance(found, str) == is_lost, (backend, count, found)
        assert not is_lost or "assigns to the variable centre, which is in no checkpoint" in found
    assert_all_equal(numbers_of(outcomes, "own_loss"))


@pytest.mark.short("torch-2")
@pytest.mark.parametrize("count", [1, 2])
def test_keras_imported_at_the_top(backend, count):
    assert_trains_with(backend, run(PROGRAMS / "keras_at_top.py", count, backend=backend))


@pytest.mark.proof
def test_keras_imported_at_the_top_of_a_new_process(backend, tmp_path):
    """As users start it. The backend is that of keras.json."""
    (tmp_path / "keras.json").write_text(json.dumps({"backend": backend}))
    assert_trains_with(backend, run(PROGRAMS / "keras_at_top.py", 2, KERAS_HOME=str(tmp_path)))


def assert_trains_with(backend, done):
    name, losses = result_of(done)
    assert name == backend
    np.testing.assert_allclose(losses, [1.762390, 1.745803], rtol=0, atol=1e-5)


@pytest.mark.proof
@pytest.mark.skipif(len(BACKENDS) < 2, reason="needs a second backend")
def test_keras_imported_with_another_backend():
    code = f"import keras, kerasdp; print(kerasdp.launch(lambda _: keras.config.backend(), backend={BACKENDS[1]!r}))"
    done = run("-c", code, KERAS_BACKEND=BACKENDS[0])
    said = f"Keras is already imported with the {BACKENDS[0]} backend: this run gets a process of its own"
    assert done.stdout.splitlines() == [said, BACKENDS[1]], done.stderr
