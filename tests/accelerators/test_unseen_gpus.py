"""GPUs that the machine has and a framework does not see end a run in a line with the cure: it would be slow else."""

import pytest

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.processes import hardware
from kerasdp.processes.devices import choose_devices
from tests.accelerators.driver import make_driver
from tests.helpers import BACKENDS, run

CURES = {
    "torch": "pip uninstall torch, then pip install 'kerasdp[torch]'",
    "jax": "pip install 'kerasdp[jax-cuda]'",
    "tensorflow": "pip install 'kerasdp[tensorflow-cuda]' in a separate environment",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A folder with that driver."""
    return make_driver(tmp_path_factory.mktemp("driver"), 2)


def train(backend, driver, *flags, **variables):
    return run(
        "recipes/train.py", f"--backend={backend}", "--max_steps=2", *flags, LD_LIBRARY_PATH=driver, **variables
    )  # fmt: skip


@pytest.mark.proof
def test_the_first_command_on_a_machine_with_gpus(backend, driver):
    done = train(backend, driver, "--gpus=2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        f"error: NVIDIA's driver has 2 GPUs, but {backend} sees none; run {CURES[backend]}"
    )
    assert done.stderr.strip().endswith("; or use --device=cpu to train on virtual CPU devices")
    done = train(backend, driver, "--gpus=2", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert "2 virtual CPU devices (as asked)" in done.stdout


@pytest.mark.proof
@pytest.mark.skipif("jax" not in BACKENDS, reason="jax is not installed")
def test_who_has_told_jax_to_use_the_cpu_gets_it(driver):
    done = train("jax", driver, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
def test_torch_counts_no_gpus_of_a_driver_that_is_too_old(monkeypatch):
    import torch

    from kerasdp.backends.torch.devices import make_devices

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # by NVML, which knows them all the same
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "num_gpus", lambda: 2)
    with pytest.raises(UserError, match="has 2 GPUs, but torch sees none; run .*, or update the driver"):
        make_devices(Config(backend="torch"))


@pytest.mark.skipif("torch" not in BACKENDS, reason="torch is not installed")
def test_torch_says_that_it_leaves_the_gpu_of_a_mac_alone(monkeypatch):
    import torch

    from kerasdp.backends.torch.devices import make_devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.setenv("KERAS_TORCH_DEVICE", "cpu")
    words = "(Apple's GPU, mps, is not used: nobody has tried kerasdp on it)"
    assert str(make_devices(Config(backend="torch"))) == f"1 virtual CPU device {words}"
    assert str(make_devices(Config(backend="torch", device="cpu"))) == "1 virtual CPU device (as asked)"


def test_what_is_unseen(monkeypatch):
    monkeypatch.setattr(hardware, "num_gpus", lambda: 1)
    with pytest.raises(UserError, match="driver has 1 GPU, but jax sees none; run pip install 'kerasdp.jax-cuda.'"):
        choose_devices(Config(backend="jax"), 0)
    assert choose_devices(Config(backend="jax", device="cpu"), 0).kind == "cpu"
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    assert choose_devices(Config(backend="jax"), 0).reason == "no GPU found"
