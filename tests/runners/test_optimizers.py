"""Keras' optimizers: a step in a graph, where the kit may have rewritten the update, learns what an eager one does."""

import pytest

from tests.conftest import BACKENDS, PROGRAMS, result_of, run

COUNTS = {"torch": (1,), "jax": (1,), "tensorflow": (1, 2)}


@pytest.mark.parametrize(("name", "count"), [(name, count) for name in BACKENDS for count in COUNTS[name]])
def test_updates_are_those_of_keras(name, count):
    """Each with what Keras does around an update: clipping, decay, averages, accumulation, constraints, schedules."""
    differences = result_of(run(PROGRAMS / "optimizers.py", name, count))
    assert {"SGD", "Adam", "Nadam"} <= set(differences)
    assert {optimizer: apart for optimizer, apart in differences.items() if apart > 1e-6} == {}
