"""The promise: what Inductor writes of a compiled step for a GPU runs as one CUDA graph that waits for nothing.

For an H100 that is not there: no kernel is compiled. Needs the triton of this torch (2.13: triton 3.7), which a build
for the CPU does not bring: pip install --no-deps --target FOLDER triton==3.7.1, and FOLDER in PYTHONPATH.
"""

import importlib.util
import json

import pytest

from tests.accelerators.test_torch_capture_for_cuda import why_not
from tests.helpers import PROGRAMS, result_of, run

reason = why_not() or ("" if importlib.util.find_spec("triton") else "needs triton, to write kernels of a GPU")
pytestmark = [pytest.mark.proof, pytest.mark.skipif(bool(reason), reason=reason)]

SGD = "sgd(learning_rate=0.01, momentum=0.9)"
CASES = {
    "convnet, SGD": {"model": "convnet", "optimizer": SGD},
    "convnet, Adam": {"model": "convnet", "optimizer": "adam"},
    "convnet, Adam, float16": {"model": "convnet", "optimizer": "adam", "precision": "float16"},
    "resnet18, SGD": {"model": "resnet18", "optimizer": SGD, "image": (32, 32, 3)},
}
# What rank 0 of 4 computes. The first step's check would compare it with ranks that are not there.
OF_RANKS = {"model": "convnet", "optimizer": SGD, "num_devices": 4, "check": "off"}


def written(case):
    done = run(PROGRAMS / "inductor_for_h100.py", json.dumps([case]), timeout=1800)
    (steps,) = result_of(done)
    assert len(steps) == 2, done.stderr  # of training and prediction
    return steps


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_graph_of_the_device(name):
    for step in written(CASES[name]):
        print(name, step)
        assert step["triton kernels"] > 0
        assert step["partitions"] == 1
        assert step["waits"] == step["kernels on the CPU"] == 0
        assert step["mutated elsewhere"] == 0  # else Inductor leaves the CUDA graph out, in a line for debuggers


def test_messages_of_ranks_are_in_the_graph_where_that_is_asked_for():
    for choice, num_partitions in (("on", 0), ("cudagraphs", 1)):
        for step in written(OF_RANKS | {"compile": choice}):
            print(choice, step)
            assert step["collectives"] > 0 and step["partitions"] == num_partitions
            assert step["waits"] == step["kernels on the CPU"] == step["mutated elsewhere"] == 0


def test_deterministic_times_nothing():
    """Of the matrix products of a net of dense layers, Inductor times those with padding, and those without."""
    (as_usual, _), (deterministic, _) = (written({"model": "mlp", "deterministic": on}) for on in (False, True))
    assert as_usual["timed"] > 0 and as_usual["deterministic"] == ["False"]
    assert deterministic["timed"] == 0 and deterministic["deterministic"] == ["True"]
