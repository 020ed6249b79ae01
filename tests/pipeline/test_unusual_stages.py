"""Stages without anything to train, and optimizers that treat weights differently: as in plain Keras."""

import numpy as np
import pytest

from tests.helpers import PROGRAMS, result_of, run


@pytest.mark.proof
def test_they_learn_as_in_keras(backend):
    results = result_of(run(PROGRAMS / "unusual_stages.py", backend, backend=backend))
    for name, (in_stages, by_keras, steps) in results.items():
        np.testing.assert_allclose(in_stages, by_keras, rtol=1e-5, err_msg=name)
        assert steps == 6, name
