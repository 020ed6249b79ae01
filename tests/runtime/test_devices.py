"""Which backend and which devices a run takes."""

import json
import sys
import types

import pytest

from kerasdp.config import Config
from kerasdp.config.validation import BACKENDS
from kerasdp.errors import UserError
from kerasdp.runtime import cuda_packages, devices
from kerasdp.runtime.devices import Devices


def test_choice_of_backend(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "is_installed", lambda name: name != "torch")
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert devices.choose_backend(None) == "jax"
    assert devices.choose_backend("tensorflow") == "tensorflow"
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert devices.choose_backend(None) == "tensorflow"
    assert devices.choose_backend("jax") == "jax"
    with pytest.raises(UserError, match=r"torch is not installed \(installed: jax, tensorflow\); add it: pip install"):
        devices.choose_backend("torch")
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    with pytest.raises(UserError, match="KERAS_BACKEND: expected one of"):
        devices.choose_backend(None)
    monkeypatch.setattr(devices, "is_installed", lambda name: False)
    monkeypatch.delenv("KERAS_BACKEND")
    with pytest.raises(UserError, match="no backend is installed"):
        devices.choose_backend(None)


WRITTEN_BY_KERAS = {"floatx": "float32", "epsilon": 1e-07, "image_data_format": "channels_last"}


@pytest.mark.parametrize(
    ("imported", "variable", "file", "expected"),
    [
        ("jax", "tensorflow", '{"backend": "tensorflow"}', "jax"),
        (None, "jax", '{"backend": "tensorflow"}', "jax"),
        (None, None, '{"backend": "jax"}', "jax"),
        (None, None, '{"backend": "tensorflow"}', "tensorflow"),
        (None, None, json.dumps(WRITTEN_BY_KERAS | {"backend": "tensorflow"}), "torch"),  # nobody's choice
        (None, None, json.dumps(WRITTEN_BY_KERAS | {"backend": "jax"}), "jax"),
        (None, None, "{", "torch"),
        (None, "", None, "torch"),
        ("openvino", None, None, "the Keras that is already imported: expected one of torch, jax, tensorflow as"),
        (None, None, '{"backend": "openvino"}', "keras.json: expected one of torch, jax, tensorflow as backend. Rec"),
    ],
)
def test_the_backend_of_a_run_that_names_none(imported, variable, file, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "is_installed", lambda name: True)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if imported:
        monkeypatch.setitem(sys.modules, "keras", keras_with(imported))
    if variable is not None:
        monkeypatch.setenv("KERAS_BACKEND", variable)
    if file:
        (tmp_path / "keras.json").write_text(file)
    if expected in BACKENDS:
        assert devices.choose_backend(None) == expected
        assert devices.choose_backend("torch") == "torch"
    else:
        with pytest.raises(UserError) as caught:
            devices.choose_backend(None)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def keras_with(name):
    """What `keras.config.backend()` needs."""
    return types.SimpleNamespace(config=types.SimpleNamespace(backend=lambda: name))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accumulate": 9, "batch_size": 16}, "--accumulate: expected at most 8, a device's samples. Received: 9"),
        ({"accumulate": 2, "backend": "tensorflow"}, "--accumulate: expected --gpus=1"),
    ],
)
def test_a_choice_that_does_not_fit_the_devices_that_are_found(changes, words):
    with pytest.raises(UserError, match=words):
        devices.choose_devices(Config(**changes), 2)
    with pytest.raises(UserError, match="one device sends no gradients"):
        devices.choose_devices(Config(gradient_precision="bfloat16"), 0)


@pytest.mark.parametrize(
    ("asked", "device", "num_gpus", "expected"),
    [
        (None, "auto", 0, Devices(kind="cpu", count=1, reason="no GPU found")),
        (4, "auto", 0, Devices(kind="cpu", count=4, reason="no GPU found")),
        (None, "auto", 3, Devices(kind="gpu", count=3)),
        (2, "gpu", 3, Devices(kind="gpu", count=2)),
        (4, "cpu", 2, Devices(kind="cpu", count=4, reason="as asked")),
    ],
)
def test_choice_of_devices(asked, device, num_gpus, expected):
    assert devices.choose_devices(Config(num_devices=asked, device=device), num_gpus) == expected


@pytest.mark.parametrize(
    ("asked", "device", "num_gpus", "words"),
    [
        (4, "auto", 2, "--gpus: there are 2. Received: 4"),
        (2, "gpu", 1, "--gpus: there is 1. Received: 2"),
        (1, "gpu", 0, "sees no GPU; use --device=auto"),
        (1, "tpu", 2, "sees no TPU, but 2 of kind gpu; use --device=auto"),
    ],
)
def test_devices_that_are_not_there(asked, device, num_gpus, words):
    with pytest.raises(UserError, match=words):
        devices.choose_devices(Config(num_devices=asked, device=device), num_gpus)


def test_any_accelerator_counts():
    found = devices.choose_devices(Config(), 4, "tpu")
    assert found == Devices(kind="tpu", count=4)
    assert str(found) == "4 TPUs"
    assert devices.choose_devices(Config(device="tpu", num_devices=1), 4, "tpu").count == 1
    with pytest.raises(UserError, match="sees no GPU, but 4 of kind tpu"):
        devices.choose_devices(Config(device="gpu"), 4, "tpu")


@pytest.mark.parametrize(
    ("files", "visible", "asked", "expected"),
    [
        (["nvidia0", "nvidia1", "nvidia2", "nvidiactl"], None, 2, "0,1"),
        (["nvidia0", "nvidia1"], None, 2, None),
        (["nvidia0", "nvidia1"], None, None, None),
        (["nvidia0", "nvidia1", "nvidia2"], "2,0", 1, "0"),  # numbers among those that are visible
        (["nvidia0", "nvidia1", "nvidia2"], "2", 1, None),
        (["null"], None, 1, None),
    ],
)
def test_gpus_that_a_run_does_not_use_are_not_seen(files, visible, asked, expected, tmp_path, monkeypatch):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus_to_see(asked, str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        (["nvidia-cudnn-cu12", "nvidia_cudnn_cu13"], "nvidia-cudnn-cu12 and nvidia-cudnn-cu13, of CUDA 12 and 13"),
        (["nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cudnn-cu12"], "nvidia-nccl-cu12 and nvidia-nccl-cu13, of"),
        (["nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cublas"], ""),
        ([], ""),
    ],
)
def test_two_cuda_versions_in_one_environment(installed, words, tmp_path, monkeypatch):
    for name in installed:
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    message = cuda_packages.mixed_cuda_packages()
    assert message.startswith(words) if words else message == ""


def test_all_gpus_must_get_a_sample():
    with pytest.raises(UserError, match="expected at least 8 for 8 devices. Received: 4"):
        devices.choose_devices(Config(batch_size=4), 8)


def test_a_batch_that_is_not_split_may_be_small():
    settings = Config(strategy="tensor", batch_size=2, num_devices=4)
    assert devices.choose_devices(settings, 4).count == 4


def test_devices_in_words():
    assert str(Devices(kind="cpu", count=4, reason="no GPU found")) == "4 virtual CPU devices (no GPU found)"
    assert str(Devices(kind="gpu", count=1)) == "1 GPU"


def test_keras_with_another_backend_cannot_be_changed(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", keras_with("jax"))
    with pytest.raises(devices.AlreadyStartedError, match="Keras is already imported with the jax backend"):
        devices.set_backend("torch")
