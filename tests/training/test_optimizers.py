"""Keras' optimizers: a graph of TensorFlow learns what eager steps do, and an embedding learns the same everywhere."""

import functools
import json

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, result_of, run


@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="others take Keras' update as it is")
@pytest.mark.parametrize(
    ("count", "names"),
    [
        (1, ("SGD accumulating", "AdamW")),
        *(pytest.param(n, (), marks=pytest.mark.proof) for n in (1, 2)),
    ],
)
def test_updates_are_those_of_keras(count, names):
    """Each with what Keras does around an update: clipping, decay, averages, accumulation, constraints, schedules."""
    differences = result_of(run(PROGRAMS / "optimizers.py", "tensorflow", count, *names, backend="tensorflow"))
    assert differences.pop("calls") == 3 * count  # steps, on each replica, of a class that counts its updates
    assert set(names or ("SGD", "Adam", "Nadam")) <= set(differences)
    assert {optimizer: apart for optimizer, apart in differences.items() if apart > 1e-6} == {}


# A token that occurs twice in a batch has two gradients on TensorFlow, which are to be summed before all else.
FEW = ("RMSprop", "SGD global_clipnorm")


@functools.cache
def embedding_updates(backend, fields, *names):
    return result_of(run(PROGRAMS / "embedding_updates.py", backend, fields, *names, backend=backend))


def assert_embeddings_learn_the_same(backend, fields, *names):
    expected = embedding_updates(BACKENDS[0], "{}", *names)
    received = embedding_updates(backend, json.dumps(fields), *names)
    assert received and received.keys() <= expected.keys()
    for name, own in received.items():
        np.testing.assert_allclose(own["losses"], expected[name]["losses"], atol=2e-6, err_msg=name)
        for weight, other in zip(own["weights"], expected[name]["weights"], strict=True):
            np.testing.assert_allclose(weight, other, atol=1e-5, err_msg=name)


@pytest.mark.proof
def test_embeddings_learn_the_same_on_each_backend(backend):
    """Gradients of an embedding: squared by RMSprop, clipped by their common norm with SGD."""
    assert_embeddings_learn_the_same(backend, {"num_devices": 1}, *FEW)


@pytest.mark.proof
@pytest.mark.parametrize("ways", [{"num_devices": 1}, {"num_devices": 2}, {"accumulate": 3},
                                  {"num_devices": 2, "accumulate": 3}], ids=str)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_embeddings_learn_the_same_with_all_optimizers(backend, ways):
    """Weight decay with exclusions, clipping, averages, scaled losses, a frozen layer; each optimizer of Keras."""
    assert_embeddings_learn_the_same(backend, ways)
