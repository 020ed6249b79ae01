"""The loop tells callbacks what Keras' own `fit`, `evaluate` and `predict` tell them, event by event."""

import pytest

from tests.helpers import PROGRAMS, result_of, run


@pytest.fixture(scope="module")
def both():
    """Of a backend: what Keras does, and what a run does."""
    known = {}

    def get(backend):
        if backend not in known:
            program = PROGRAMS / "events.py"
            keras = run(program, "keras", backend=backend, KERAS_BACKEND=backend)
            known[backend] = result_of(keras), result_of(run(program, "kerasdp", backend, backend=backend))
        return known[backend]

    return get


def test_events_logs_and_results_are_those_of_keras(backend, both):
    of_keras, of_run = both(backend)
    assert of_run.keys() == of_keras.keys() and len(of_run) >= 13
    for case, expected in of_keras.items():
        assert of_run[case] == approximately(expected), case


def approximately(value):
    """The same but for round-off of numbers."""
    if isinstance(value, dict):
        return {name: approximately(each) for name, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
