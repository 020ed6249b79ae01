"""The loop tells callbacks what Keras' own `fit`, `evaluate` and `predict` tell them, event by event."""

import json

import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run
from tests.programs.events import SEVERAL, cases

CASES = [name for name, *_ in cases()]
# Each case takes graphs of its own on jax and tensorflow. Keras takes no several steps on torch.
QUICK = {
    "torch": [name for name in CASES if name != SEVERAL],
    "jax": ["validation", SEVERAL],
    "tensorflow": [SEVERAL],
}


def compare(backend, names):
    program, names = PROGRAMS / "events.py", json.dumps(names)
    of_keras = result_of(run(program, "keras", names, backend=backend, KERAS_BACKEND=backend))
    of_run = result_of(run(program, backend, names, backend=backend))
    assert of_run.keys() == of_keras.keys() == set(json.loads(names))
    for case, expected in of_keras.items():
        assert of_run[case] == approximately(expected), case


@pytest.mark.short("torch")
def test_events_logs_and_results_are_those_of_keras(backend):
    compare(backend, QUICK[backend])


@pytest.mark.proof
def test_weights_and_their_averages_part_after_a_training():
    results = [result_of(run(PROGRAMS / "events.py", name, "again", backend=name)) for name in ("torch", "jax")]
    assert results[1] == approximately(results[0])


def test_what_cannot_be_is_one_line():
    said = result_of(run(PROGRAMS / "events.py", BACKENDS[0], "refused", backend=BACKENDS[0]))
    assert said["compiles"].endswith("was compiled again during fit; call compile between two calls of fit")
    assert said["trains"].startswith("fit was called within fit, by a callback")


@pytest.mark.proof
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "torch"])
def test_in_all_cases(backend):
    compare(backend, CASES)


def approximately(value):
    """The same but for round-off of numbers."""
    if isinstance(value, dict):
        return {name: approximately(each) for name, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
