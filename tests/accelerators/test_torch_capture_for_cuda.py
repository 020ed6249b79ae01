"""The promise: a compiled step on a GPU holds nothing of the CPU, so that no step waits for a copy from there.

On a CUDA device that is none: its memory and its kernels are the CPU's (`cuda_on_cpu.cpp`).
"""

import importlib.util
import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest

from tests.helpers import BACKENDS, PROGRAMS, ROOT, result_of, run


def why_not():
    """Why there cannot be such a device here; nothing if there can. Imports no torch."""
    if "torch" not in BACKENDS:
        return "the captured step is torch's"
    if any((pathlib.Path(importlib.util.find_spec("torch").origin).parent / "lib").glob("*torch_cuda*")):
        return "this torch has a CUDA of its own: python -m pytest -m gpu"
    return "" if shutil.which("g++") else "needs g++, to make a CUDA device that is none"


pytestmark = [pytest.mark.proof, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SGD, CLIPPED = (f"sgd(learning_rate=0.01, momentum=0.9{more})" for more in ("", ", global_clipnorm=1.0"))
MODELS = {
    "mlp": (28, 28, 1),
    "lenet": (28, 28, 1),
    "convnet": (28, 28, 1),
    "resnet18": (32, 32, 3),
    "resnet50": (32, 32, 3),
}
OPTIMIZERS = (SGD, "adam", "adamw(weight_decay=0.01)", CLIPPED)
QUICK = {
    "convnet": {"model": "convnet", "optimizer": "adam", "runs": True},
    "half": {"model": "lenet", "optimizer": CLIPPED, "precision": "float16"},
    "adding": {"model": "mlp", "layer": "adding"},
    "drawing": {"model": "mlp", "layer": "drawing"},
}
NOTHING = {"on the CPU": 0, "numbers in memory": 0, "read": 0, "copied": 0}


def capture(*cases, device=()):
    done = run(PROGRAMS / "capture_for_cuda.py", json.dumps(cases), *device, timeout=1800, PYTHONPATH=str(ROOT))
    return result_of(done), [line for line in done.stderr.splitlines() if line.startswith("warning: ")]


def assert_on_device(found):
    for step in ("train", "test", "predict"):
        assert {name: found[step][name] for name in NOTHING} == NOTHING, step


@pytest.fixture(scope="module")
def quick():
    """What a few cases give, by name, and the warnings: one process, whose start takes most of the time."""
    results, warnings = capture(*QUICK.values())
    return dict(zip(QUICK, results, strict=True)), warnings


def test_steps_are_the_devices_alone(quick):
    """Dropout, float16 with a loss that is scaled: no number is on the CPU, or read from there."""
    found, _ = quick
    for name in ("convnet", "half", "adding"):
        assert_on_device(found[name])


def test_steps_compute_what_they_do_on_the_cpu(quick):
    found, _ = quick
    (on_cpu,), _ = capture(QUICK["convnet"], device=["cpu"])
    results, expected = found["convnet"]["results"], on_cpu["results"]
    assert len(results["losses"]) == 3
    for name in ("losses", "evaluated", "outputs"):  # to round-off: convolutions there are not oneDNN's
        np.testing.assert_allclose(results[name], expected[name], rtol=0, atol=5e-6, err_msg=name)


BOTH = """
import json, sys
sys.path.insert(0, "tests/programs")
import cuda_on_cpu
cuda_on_cpu.start()
import kerasdp

def train(runner):
    import keras
    return runner.devices.kind, str(keras.ops.zeros(1).device)

if __name__ == "__main__":
    print("RESULT", json.dumps([kerasdp.launch(train, backend="torch", device=kind) for kind in ("gpu", "cpu")]))
"""


def test_a_run_on_the_cpu_after_one_on_a_gpu():
    """Keras asks for its device once: the second run gets a process of its own."""
    assert result_of(run("-c", BOTH)) == [["gpu", "cuda:0"], ["cpu", "cpu"]]


def test_what_stays_on_the_cpu_is_named(quick):
    """Random numbers, which the device would draw otherwise."""
    found, warnings = quick
    assert found["drawing"]["train"]["on the CPU"] == found["drawing"]["train"]["copied"] == 1
    drawn, *waiting = warnings
    assert "draws random numbers that are not from keras.random" in drawn
    assert len(waiting) == 3 and all("waits for CPU operations: aten.rand" in line for line in waiting)


@pytest.mark.parametrize("model", MODELS)
def test_steps_of_all_models(model):
    choices = [(optimizer, "float32") for optimizer in OPTIMIZERS]
    choices += itertools.product((SGD, "adam"), ("float16", "bfloat16"))
    cases = [
        {"model": model, "image": MODELS[model], "optimizer": optimizer, "precision": precision}
        for optimizer, precision in choices
    ]
    results, warnings = capture(*cases)
    assert not warnings
    for case, found in zip(cases, results, strict=True):
        print(case["model"], case["optimizer"], case["precision"], found["train"])
        assert_on_device(found)


# Of tests/real_code: attention and masks, recurrence, tables, images made larger, depthwise convolutions.
NETS = (
    "small_gpt", "transformer_with_empty_rows", "characters_lstm", "bidirectional_lstm", "masked_lstm", "two_towers",
    "video_frames_then_rnn", "unet_segmentation", "super_resolution", "conv_mixer", "squeeze_and_excite",
)  # fmt: skip


@pytest.mark.parametrize("num_devices", [1, 8])
def test_steps_of_many_kinds_of_layers(num_devices):
    """On 8 ranks with 9 rows, of which three ranks have none; on one rank of them."""
    cases = [{"net": net, "optimizer": "adam", "num_devices": num_devices, "check": "off"} for net in NETS]
    cases += [case | {"precision": precision} for case, precision in zip(cases, ["float16", "bfloat16"], strict=False)]
    results, warnings = capture(*cases)
    assert not warnings
    for case, found in zip(cases, results, strict=True):
        print(case["net"], found["train"])
        assert (found["train"]["collectives"] > 0) == (num_devices > 1)
        assert_on_device(found)


def test_recurrence_by_cudnn_is_named():
    """No graph can hold its kernel; it is faster than the steps that a graph would hold."""
    results, warnings = capture(*({"net": net, "cudnn": True} for net in ("characters_lstm", "bidirectional_lstm")))
    assert not any("train" in found for found in results)
    assert len(warnings) == 2
    assert all("a recurrent layer of functional" in line and "uses cuDNN's kernel" in line for line in warnings)
    assert all(found["test"]["nodes"] > 10 for found in results)  # without gradients a graph holds it


@pytest.mark.parametrize("batch_norm", ["sync", "replica"])
def test_steps_of_several_ranks(batch_norm):
    """With the collectives among the operations, and rows that do not divide."""
    common = {"num_devices": 3, "check": "off", "batch_norm": batch_norm}
    cases = [
        {"model": "resnet18", "image": MODELS["resnet18"], "optimizer": CLIPPED, **common},
        {"model": "convnet", "optimizer": "adam", "precision": "float16", **common},
    ]
    results, warnings = capture(*(cases if batch_norm == "sync" else cases[:1]))
    assert not warnings
    for case, found in zip(cases, results, strict=False):
        print(case["model"], found["train"])
        assert found["train"]["collectives"] > 0
        assert_on_device(found)
