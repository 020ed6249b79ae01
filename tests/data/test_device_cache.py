"""Data that stays on the devices: a step sends the numbers of its rows, and trains on the same rows."""

import pytest

from tests.helpers import PROGRAMS, all_but, result_of, run


@all_but("tensorflow", "jax")
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_rows_that_are_taken_on_the_device_are_those_of_the_batch(backend, count):
    """Two inputs of two types, an epoch that does not divide, and validation."""
    off, on = (
        result_of(run(PROGRAMS / "data_on_device.py", backend, count, choice, backend=backend))
        for choice in ("off", "on")
    )
    assert on["history"] == off["history"] and on["weights"] == off["weights"]
    # Of the first batches for shapes and NaN, and of a few rows for what is found out before the first step.
    assert off["reads"] > 3 * 8 and on["reads"] <= 6
