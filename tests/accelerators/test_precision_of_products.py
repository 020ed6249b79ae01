"""What GPUs multiply in: as the framework lets them by default, in TF32, or exactly; jax's: test_jax_devices.py."""

import os
import types

import pytest

from kerasdp.config import Config
from kerasdp.processes.devices import Devices
from kerasdp.reporting import report
from tests.helpers import BACKENDS

# The choices, and whether torch's convolutions, torch's products of matrices, and TensorFlow may use TF32.
CHOICES = [
    ({}, True, False, True),
    ({"precision": "tf32"}, True, True, True),
    ({"precision": "float32"}, False, False, False),
    ({"deterministic": True}, False, False, False),
]


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
@pytest.mark.parametrize(("choices", "convolutions", "matrices", "_"), CHOICES)
def test_torch(choices, convolutions, matrices, _, monkeypatch):
    import torch

    from kerasdp.backends.torch import devices

    for name in ("KERAS_TORCH_DEVICE", "TORCHINDUCTOR_CACHE_DIR", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, os.environ.get(name, "set"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda is_on: None)
    try:
        devices.device_of_process(Devices(kind="gpu", count=1), Config(backend="torch", **choices))
        assert torch.backends.cudnn.allow_tf32 == convolutions
        assert torch.backends.cuda.matmul.allow_tf32 == matrices
        assert torch.backends.cudnn.benchmark != choices.get("deterministic", False)
    finally:  # torch's defaults
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False
        torch.backends.cudnn.benchmark = False


@pytest.mark.proof
@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="tensorflow is not installed")
@pytest.mark.parametrize(("choices", "_", "__", "expected"), CHOICES)
def test_tensorflow(choices, _, __, expected, monkeypatch):
    import tensorflow as tf

    from kerasdp.backends.tensorflow import devices

    given = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda found, kind: None)
    monkeypatch.setattr(tf.config.experimental, "enable_tensor_float_32_execution", given.append)
    monkeypatch.setattr(tf.config.experimental, "enable_op_determinism", lambda: None)
    devices.make_devices(Config(backend="tensorflow", **choices))
    assert given == [expected]


def test_the_first_line_says_it():
    facts = types.SimpleNamespace(device_kind="gpu", config=Config())
    assert report._precision(facts) == "float32, in TF32 where the GPU has it (--precision=float32: exact)"
    facts.config = Config(deterministic=True)
    assert report._precision(facts) == "float32"
    facts.config = Config(precision="tf32")
    assert report._precision(facts) == "tf32"
    facts.config, facts.device_kind = Config(), "cpu"
    assert report._precision(facts) == "float32"
