"""Optuna and keras_tuner search around the runs, and within one, where all ranks see the same trials."""

import json

import pytest

from tests.helpers import PROGRAMS, result_of, run


@pytest.mark.proof
@pytest.mark.parametrize("place", ["around", "inside"])
@pytest.mark.parametrize("tool", ["optuna", "keras_tuner"])
def test_a_search(tool, place, backend, tmp_path):
    if (tool, backend) == ("keras_tuner", "tensorflow"):
        pytest.importorskip("tensorboard")  # which keras_tuner (1.4) imports with TensorFlow
    # keras_tuner builds a model before the first run, which on jax gets a process of its own: not one that is forked.
    warm = backend if (tool, place) != ("keras_tuner", "around") else None
    done = run(PROGRAMS / "search.py", tool, place, backend, 2, tmp_path, backend=warm, KERAS_BACKEND=backend)
    trials = result_of(done)
    assert len({json.dumps(values) for values, _ in trials}) == len(trials) >= 2
    assert len({score for _, score in trials}) == len(trials)
    if place == "inside":
        of_ranks = [json.loads(path.read_text()) for path in tmp_path.glob("trials-*.json")]
        assert len(of_ranks) == (2 if backend == "torch" else 1)
        assert all(found == trials for found in of_ranks)
