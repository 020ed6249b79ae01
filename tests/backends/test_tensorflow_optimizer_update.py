"""An update as one compiled operation is Keras' update; what cannot be one is known."""

import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run


@pytest.mark.proof
@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="the update is TensorFlow's")
def test_one_operation_updates_as_keras_does():
    results = result_of(run(PROGRAMS / "optimizer_update.py", backend="tensorflow"))
    for name, (can_be_one, difference) in results["differences"].items():
        assert can_be_one and difference < 1e-6, name
    assert results["refused"] == dict.fromkeys(["own", "nadam"], False)
