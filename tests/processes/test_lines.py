"""Errors of devices in the words of the frameworks (torch 2.13, jax 0.10, TensorFlow 2.21), each told in a line."""

import importlib

import pytest

from kerasdp.processes.error_text import explained, lost_process
from tests.helpers import BACKENDS

TEXTS = [
    (
        "torch", "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a capacity of 79.10 GiB, of which 1 is free.",
        "a device has too little memory (CUDA out of memory. Tried to allocate 20.00 GiB.",
    ),
    ("torch", "AcceleratorError", "CUDA error: no kernel image is available for execution on the device\nCUDA",
     "a GPU or NCCL failed (CUDA error: no kernel image is available for execution on the device); nvidia-smi"),
    ("torch", "RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "NCCL failed (cuDNN error: CUDNN_STATUS_"),
    (
        "torch.distributed", "DistBackendError",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.29.3\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nError while creating shared memory segment /dev/shm/nccl-7 (size 9637888), error: No space left",
        "NCCL has too little shared memory (Error while creating shared memory segment /dev/shm/nccl-7",
    ),
    ("torch.distributed", "DistBackendError", "NCCL error in: X.cpp:1, invalid usage\nnccl", "NCCL failed (NCCL error"),
    ("jax.errors", "JaxRuntimeError", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 85899345920 bytes.",
     "a device has too little memory (RESOURCE_EXHAUSTED: Out of memory while trying to allocate 85899345920 bytes)"),
    ("torch", "RuntimeError", "\x1b[1mput_ does not have a deterministic implementation, but you set 'torch.use_",
     "deterministic: put_ does not have a deterministic implementation; remove that operation, or leave "),
    ("jax.errors", "JaxRuntimeError", "INTERNAL: CUDA error: CUDA_ERROR_ILLEGAL_ADDRESS: an", "a GPU or NCCL failed"),
    ("tensorflow.errors", "ResourceExhaustedError",
     "Graph execution error:\n\nDetected at node x\nOOM when allocating tensor with shape[9,9] on GPU:0\n [[x]]",
     "a device has too little memory (OOM when allocating tensor with shape[9,9] on GPU:0)"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "text", "expected"), TEXTS)
def test_each_is_a_line(module, name, text, expected):
    if module.partition(".")[0] not in BACKENDS:
        pytest.skip(f"{module} is not installed")
    kind = RuntimeError if name == "RuntimeError" else getattr(importlib.import_module(module), name)
    told = str(explained(kind(None, None, text) if module == "tensorflow.errors" else kind(text)))
    assert told.startswith(expected) or expected in told, told
    assert "\n" not in told


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
def test_a_device_that_is_full_at_the_start_is_a_line(monkeypatch):
    import torch

    import kerasdp
    from kerasdp.backends.torch.data_parallel import DataParallel

    def fill(*_):
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    monkeypatch.setattr(DataParallel, "__init__", fill)
    with pytest.raises(kerasdp.RunError, match="a device has too little memory .CUDA error: out of memory"):
        kerasdp.launch(print, backend="torch", num_devices=1, device="cpu")


@pytest.mark.parametrize(
    "error", [ValueError("CUDA error"), RuntimeError("out of memory"), OSError("/dev/shm"), KeyError(1)]
)
def test_what_no_device_has_said_stays_as_it_is(error):
    assert explained(error) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[/__w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:501. "
            "This is typically caused by a remote worker crashing.",
            "Connection closed by peer [10.0.0.2]:501",
        ),
        (
            "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error "
            "[10.77.0.2]:6363: Connection reset by peer",
            "Read error [10.77.0.2]:6363: Connection reset by peer",
        ),
    ],
)
def test_a_process_that_has_gone_is_a_line(text, said):
    found = lost_process(RuntimeError(text))
    assert str(found) == f"another process of the run has ended ({said}); the output of that process says why"
    assert lost_process(RuntimeError("Expected all tensors to be on the same device")) is None
