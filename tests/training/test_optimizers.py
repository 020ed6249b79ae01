"""Keras' optimizers on TensorFlow, where the kit takes updates apart: a graph learns what eager steps do."""

import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run

pytestmark = pytest.mark.skipif("tensorflow" not in BACKENDS, reason="others take Keras' update as it is")


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_updates_are_those_of_keras(count):
    """Each with what Keras does around an update: clipping, decay, averages, accumulation, constraints, schedules."""
    differences = result_of(run(PROGRAMS / "optimizers.py", "tensorflow", count, backend="tensorflow"))
    assert differences.pop("calls") == 3 * count  # steps, on each replica, of a class that counts its updates
    assert {"SGD", "Adam", "Nadam"} <= set(differences)
    assert {optimizer: apart for optimizer, apart in differences.items() if apart > 1e-6} == {}
