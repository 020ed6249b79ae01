"""The promise: an eager step of torch lets the host run ahead of a GPU: it reads nothing from it, nor waits to send.

On a CUDA device that is none: its memory and its kernels are the CPU's (`cuda_on_cpu.cpp`).
"""

import json
import types

import numpy as np
import pytest

from tests.accelerators.test_torch_capture_for_cuda import why_not
from tests.helpers import PROGRAMS, result_of, run

pytestmark = [pytest.mark.proof, pytest.mark.skipif(bool(why_not()), reason=why_not())]

QUICK = ["sgd", "adam", "own step"]
OTHERS = [
    "global_clipnorm", "scaled",
    "nesterov", "plain", "decay", "clipnorm", "clipvalue", "weight_decay", "average", "accumulating", "amsgrad",
    "adamw", "rmsprop", "adagrad", "adadelta", "adamax", "nadam", "lion", "ftrl", "lamb", "muon", "adafactor",
]  # fmt: skip
NUM_STEPS = 6 + 6 + 12  # three runs
NUM_WAITED = 2 * NUM_STEPS  # of both losses and rates, which are written for each step here


def trained(cases, **settings):
    """What steps wait for on the device, beside the losses of the CPU."""
    arguments = [json.dumps(cases), *([json.dumps(settings)] if settings else [])]
    found = result_of(run(PROGRAMS / "device_waits.py", "gpu", *arguments))
    on_cpu = result_of(run(PROGRAMS / "device_waits.py", "cpu", *arguments, backend="torch"))
    for case in cases:
        np.testing.assert_allclose(found[case]["losses"], on_cpu[case]["losses"], rtol=2e-6)
        assert on_cpu[case]["waited"] == 0
    return found


@pytest.fixture(scope="module")
def quick():
    return trained(QUICK)


@pytest.mark.parametrize("case", QUICK[:-1])
def test_no_step_of_training_waits(quick, case):
    """Without the mends a step with SGD reads three numbers, and sends 32; with clipping 36."""
    step = quick[case]["fit"]
    assert (step["read"], step["sent"]) == (0, 0)
    assert quick[case]["waited"] == NUM_WAITED  # losses and rates come by themselves, and are waited for one by one


def test_user_defined_steps_wait_for_the_rate_of_a_line_alone(quick):
    """They do not tell it, so it is read for each line of `steps.jsonl`, here of each step."""
    step = quick["own step"]["fit"]
    assert (step["read"], step["sent"]) == (1, 0)
    assert quick["own step"]["waited"] == NUM_WAITED / 2


def test_no_step_of_evaluation_and_prediction_waits(quick):
    evaluated, predicted = quick["sgd"]["evaluate"], quick["sgd"]["predict"]
    assert evaluated["read"] == evaluated["sent"] == predicted["sent"] == 0
    assert predicted["read"] == 1  # Keras takes the outputs of all batches when the last one is done


def test_updates_are_those_of_all_weights_in_one_call(quick):
    """As on the CPU: SGD with momentum takes two calls for all weights, Adam three."""
    assert quick["sgd"]["fit"]["_foreach_add_"] == 2
    assert quick["adam"]["fit"]["_foreach_add_"] == 3


def test_one_replica_normalizes_by_the_kernel_of_the_device(quick):
    assert quick["sgd"]["fit"]["native_batch_norm"] == 1


def test_arrays_that_stay_on_the_device_are_not_pinned(quick):
    """Pinned memory is never given back: only what comes in each step is, 5 rows of 40 bytes, or their numbers."""
    assert quick["pinned"] == {"kept": [20], "kept, again": [20], "read": [200]}


def test_copies_have_a_stream_of_their_own(quick):
    """Else they would queue behind the steps. Each batch is waited for in the thread that reads it, and its inputs and
    targets are kept for the stream of the steps; prediction has no targets.
    """
    awaited = (len(QUICK) + 2) * NUM_STEPS
    kept = 2 * awaited - NUM_STEPS
    assert quick["streams"] == {"threads": ["reading"], "awaited": [0, awaited], "kept": [kept, 0]}


STAGES = {"strategy": "pipeline", "split_size": 2}


def test_no_step_of_a_pipeline_waits():
    """One stage; what all weights share, metrics and clipping are there, too."""
    found = trained(["global_clipnorm", "scaled"], **STAGES)
    for case in ("global_clipnorm", "scaled"):
        step = found[case]["fit"]
        assert (step["read"], step["sent"]) == (0, 0)
        assert found[case]["waited"] == NUM_WAITED


def test_no_step_in_micro_batches_waits():
    found = trained(["sgd"], accumulate=2)["sgd"]
    assert [found[name]["sent"] for name in ("fit", "evaluate", "predict")] == [0, 0, 0]
    assert [found[name]["read"] for name in ("fit", "evaluate", "predict")] == [0, 0, 1]
    assert found["fit"]["native_batch_norm"] == 2


def test_reading_threads_have_the_gpu_of_their_rank(monkeypatch):
    """A new thread's is the first one of the host."""
    torch = pytest.importorskip("torch")
    from kerasdp.backends.torch.devices import TorchStrategy

    chosen = []
    for name in ("set_device", "Stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given, name=name: chosen.append((name, given)))
    for device in (torch.device("cpu"), torch.device("cuda", 3)):
        TorchStrategy.begin_reading_thread(types.SimpleNamespace(device=device))
    gpu = torch.device("cuda", 3)
    assert chosen == [("set_device", gpu), ("Stream", gpu), ("set_stream", None)]


def test_no_step_waits_whatever_the_optimizer():
    found = trained(OTHERS)
    for case in OTHERS:
        step = found[case]["fit"]
        print(case, step)
        # Whether it is time to update cannot be asked otherwise.
        assert (step["read"], step["sent"]) == (case == "accumulating", 0), case
