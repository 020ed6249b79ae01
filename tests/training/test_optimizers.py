"""Keras' optimizers, and user-defined ones, learn the same everywhere."""

import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, results

# A token that occurs twice in a batch has two gradients on TensorFlow, which are to be summed before all else.
FEW = ("SGD global_clipnorm", "SGD accumulating", "AdamW")


def assert_embeddings_learn_the_same(backend, fields, *names):
    expected = results("optimizers.py", BACKENDS[0], "{}", *names)
    received = results("optimizers.py", backend, json.dumps(fields), *names)
    assert received and received.keys() <= expected.keys()
    for name, own in received.items():
        assert own["calls"] > 0 or (name, backend) != ("Counting", "tensorflow")
        np.testing.assert_allclose(own["losses"], expected[name]["losses"], atol=2e-6, err_msg=name)
        for weight, other in zip(own["weights"], expected[name]["weights"], strict=True):
            np.testing.assert_allclose(weight, other, atol=1e-5, err_msg=name)


@pytest.mark.short("tensorflow")
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_embeddings_learn_the_same_on_each_backend(backend):
    """Torch takes Keras' updates as they are; TensorFlow's graphs, and several devices, have their own."""
    assert_embeddings_learn_the_same(backend, {"num_devices": 1}, *FEW)


@pytest.mark.proof
@pytest.mark.parametrize("ways", [{"num_devices": 1}, {"num_devices": 2}, {"accumulate": 3},
                                  {"num_devices": 2, "accumulate": 3}], ids=str)  # fmt: skip
def test_embeddings_learn_the_same_with_all_optimizers(backend, ways):
    """Clipping, decay with exclusions, averages, accumulation, constraints, schedules, scaled losses."""
    assert_embeddings_learn_the_same(backend, ways)
