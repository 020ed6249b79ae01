"""The promise: an eager step of torch lets the host run ahead of a GPU: it reads nothing from it, nor waits to send.

On a CUDA device that is none: its memory and its kernels are the CPU's (`cuda_on_cpu.cpp`).
"""

import json
import threading
import types

import numpy as np
import pytest

from tests.accelerators.test_torch_capture_for_cuda import why_not
from tests.helpers import PROGRAMS, result_of, run

pytestmark = [pytest.mark.proof, pytest.mark.skipif(bool(why_not()), reason=why_not())]

QUICK = ["sgd", "adam", "own step"]
OTHERS = [
    "global_clipnorm", "scaled", "decay", "average", "accumulating", "rmsprop", "nadam", "lamb", "muon", "adafactor",
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


NOTHING = {"read": 0, "sent": 0}


@pytest.mark.parametrize(
    ("case", "step", "expected"),
    [
        # Without the mends a step with SGD reads three numbers, and sends 32; with clipping 36. An update is one call
        # for all weights; one replica normalizes by the kernel of the device.
        ("sgd", "fit", NOTHING | {"update_": 1, "native_batch_norm": 1}),
        ("adam", "fit", NOTHING | {"update_": 1}),
        # A user-defined step does not tell its rate, so it is read for each line of `steps.jsonl`, here of each step.
        ("own step", "fit", NOTHING | {"read": 1}),
        ("sgd", "evaluate", NOTHING),
        ("sgd", "predict", NOTHING | {"read": 1}),  # Keras takes the outputs of all batches when the last one is done
    ],
)
def test_what_a_step_waits_for(quick, case, step, expected):
    assert expected.items() <= quick[case][step].items()


def test_losses_and_rates_come_by_themselves_and_are_waited_for_one_by_one(quick):
    assert [quick[case]["waited"] for case in QUICK] == [NUM_WAITED, NUM_WAITED, NUM_WAITED / 2]


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
    from kerasdp.backends.torch import devices

    chosen = []
    monkeypatch.setattr(devices, "put_batch", lambda batch, device: batch)
    for name in ("set_device", "Stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given, name=name: chosen.append((name, given)))
    gpu = torch.device("cuda", 3)
    for device in (torch.device("cpu"), gpu):
        own = types.SimpleNamespace(device=device, is_gpu=device == gpu, _threads=threading.local())
        own._threads.is_ready = True  # in the thread that trains
        devices.TorchStrategy.put_batch(own, None)
        reading = threading.Thread(
            target=lambda own=own: [devices.TorchStrategy.put_batch(own, None) for _ in range(2)]
        )
        reading.start()
        reading.join()
    assert chosen == [("set_device", gpu), ("Stream", gpu), ("set_stream", None)]


def test_no_step_waits_whatever_the_optimizer():
    found = trained(OTHERS)
    for case in OTHERS:
        step = found[case]["fit"]
        print(case, step)
        # Whether it is time to update cannot be asked otherwise.
        assert (step["read"], step["sent"]) == (case == "accumulating", 0), case
