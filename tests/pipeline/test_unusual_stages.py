"""Stages without anything to train, and optimizers that treat weights differently: as in plain Keras."""

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="of torch's pipelines")
def test_they_learn_as_in_keras():
    results = result_of(run(PROGRAMS / "unusual_stages.py", backend="torch"))
    for name, (in_stages, by_keras, steps) in results.items():
        np.testing.assert_allclose(in_stages, by_keras, rtol=1e-5, err_msg=name)
        assert steps == 6, name
