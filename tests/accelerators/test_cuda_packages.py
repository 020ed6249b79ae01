"""Libraries of two versions of CUDA in one environment are named before they fail."""

import importlib
import sys
import types

import pytest

from kerasdp.config import Config
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.hardware import clash_of_cuda_packages

launch = importlib.import_module("kerasdp.launch")  # the package has a function of that name

# What pip makes of tensorflow[and-cuda] 2.21 and of jax[cuda13] 0.10.2, with torch 2.13.
CUDA_12 = ["nvidia_cudnn_cu12", "nvidia-nccl-cu12", "nvidia-cublas-cu12"]
CUDA_13 = ["nvidia-cudnn-cu13", "NVIDIA.nccl.cu13", "nvidia-cublas", "nvidia-nvshmem-cu13", "nvidia-ml-py", "numpy"]
LINE = (
    "packages of CUDA 12 and 13 have overwritten each other in this environment: nvidia-cudnn-cu12, nvidia-cudnn-cu13, "
    "nvidia-nccl-cu12, nvidia-nccl-cu13; use one environment for each backend (docs/accelerators.md)"
)


def install(folder, names):
    for name in names:
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    return [str(folder)]


@pytest.mark.parametrize(
    ("names", "expected"), [(CUDA_12, None), (CUDA_13, None), ([], None), (CUDA_12 + CUDA_13, LINE)]
)
def test_packages_of_two_versions(names, expected, tmp_path):
    assert clash_of_cuda_packages(install(tmp_path, names)) == expected


def test_a_run_on_gpus_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*install(tmp_path, CUDA_12 + CUDA_13), *sys.path])
    # A backend with a GPU.
    backend = types.SimpleNamespace(
        make_devices=lambda settings, cluster: Devices(kind="gpu", count=1), start_workers=lambda *arguments: "started"
    )
    with monkeypatch.context() as patched:
        patched.setattr(launch.importlib, "import_module", lambda name: backend)
        assert launch._start(None, Config(backend="torch"), print) == "started"
    assert capsys.readouterr().err == f"warning: {LINE}\n"
    monkeypatch.setattr("kerasdp.runtime.hardware.num_gpus", lambda platform: 0)
    launch._warn_of_cuda(Devices(kind="tpu", count=1))  # which has no use for CUDA
    assert capsys.readouterr().err == ""
