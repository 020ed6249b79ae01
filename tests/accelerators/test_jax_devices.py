"""How jax is started where there are GPUs, TPUs or several hosts."""

import concurrent.futures
import os

import numpy as np
import pytest

from kerasdp.config import Config
from kerasdp.processes.devices import Devices
from tests.accelerators.driver import make_driver
from tests.helpers import BACKENDS, PROGRAMS, result_of, run
from tests.hosts.together import free_port

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="jax is not installed")


def test_jax_sees_only_the_gpus_of_the_run():
    seen = result_of(run(PROGRAMS / "jax_devices.py", "limit", backend="jax"))
    # This jax has no CUDA.
    assert seen.pop("devices").startswith("UserError: NVIDIA's driver has 4 GPUs, but jax sees none; run pip install")
    assert seen == {
        "1": "0", "2": "0,1", "4": "all", "5": "all", "None": "all",
        "chosen": "2,3",
        "started before": False,
        "of the run": "0,1",
    }  # fmt: skip


@pytest.mark.proof
def test_gpus_that_an_earlier_run_left_out_need_a_new_process(tmp_path):
    seen = result_of(run(PROGRAMS / "jax_devices.py", "kept_for_the_cpu", LD_LIBRARY_PATH=make_driver(tmp_path, 4)))
    assert seen == [
        "1 virtual CPU device (as asked)",
        "AlreadyStartedError: JAX has already started with 0 of 4 GPUs",
    ]  # fmt: skip


DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", DETERMINISTIC),
        ("--xla_gpu_autotune_level=4", "--xla_gpu_autotune_level=4 --xla_gpu_deterministic_ops=true"),
    ],
)
def test_flags_of_a_deterministic_run_are_known_to_xla_and_set_once(given, expected):
    done = run(PROGRAMS / "jax_devices.py", "deterministic", XLA_FLAGS=given)
    assert result_of(done) == [expected, 5.0]


@pytest.mark.proof
def test_a_run_cannot_become_deterministic_once_jax_has_started():
    message = f"AlreadyStartedError: JAX has started without {DETERMINISTIC}; set XLA_FLAGS before you use JAX"
    assert result_of(run(PROGRAMS / "jax_devices.py", "late", backend="jax")) == [message, ""]


def test_float32_means_float32_on_any_accelerator():
    seen = result_of(run(PROGRAMS / "jax_devices.py", "precisions", backend="jax"))
    assert seen == {
        "cpu auto": "None", "cpu float32": "None", "cpu tf32": "None", "cpu bfloat16": "None",
        "gpu auto": "None", "gpu float32": "float32", "gpu tf32": "tensorfloat32", "gpu bfloat16": "float32",
        "tpu auto": "float32", "tpu float32": "float32", "tpu tf32": "tensorfloat32", "tpu bfloat16": "float32",
        "deterministic": "float32",
    }  # fmt: skip


def test_a_run_on_tpus():
    seen = result_of(run(PROGRAMS / "jax_devices.py", "as_tpus", backend="jax"))
    assert seen == {
        "devices": "2 TPUs", "kind": "tpu", "precision": "float32",
        # Keras' kernel for TPUs computes something else.
        "flash attention": False,
    }  # fmt: skip


@pytest.mark.proof
def test_processes_that_a_script_has_joined_are_those_of_the_run():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda rank: run(PROGRAMS / "jax_devices.py", "hosts", rank, port), range(2)))
    for rank, found in enumerate(map(result_of, results)):
        assert found[:2] == ["jax.distributed.initialize", rank]
        assert found[2].startswith("2 virtual CPU devices of 2 processes"), found


@pytest.mark.proof
def test_a_platform_that_does_not_start_is_one_line():
    done = run("recipes/train.py", "--backend=jax", JAX_PLATFORMS="tpu")
    if os.path.exists("/dev/accel0"):
        pytest.skip("there is a TPU")
    assert done.returncode == 2 and "error: jax cannot start: Unable to initialize backend 'tpu'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("kind", "stays"), [("cpu", False), ("gpu", True), ("tpu", True)])
def test_data_stays_on_any_accelerator(kind, stays):
    from kerasdp.data.sources import ArraySource
    from kerasdp.training.readers import _stays_on_device

    source = ArraySource(np.zeros((4, 2), "uint8"), np.zeros(4))
    assert _stays_on_device(source, Config(), Devices(kind=kind, count=1)) == stays
