"""Gradients that are sent in half as many bytes teach nearly the same."""

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run


@pytest.mark.proof
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "jax"])
def test_gradients_in_bfloat16(name):
    whole, half = (
        result_of(run(PROGRAMS / "gradient_precision.py", name, precision, backend=name))
        for precision in ("float32", "bfloat16")
    )
    assert len(whole) == 15
    assert half[0] == whole[0]
    np.testing.assert_allclose(half, whole, rtol=2e-2)
    # It would be round-off, 1e-7, if nothing were sent in bfloat16.
    assert max(abs(np.divide(half, whole) - 1)) > 1e-5
