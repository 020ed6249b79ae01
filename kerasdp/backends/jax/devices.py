"""JAX: makes the devices of a run, all driven by one process."""

import os
from collections.abc import Callable
from typing import Any

import jax

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime.devices import Devices, choose_devices


def make_devices(config: Config) -> Devices:
    """Makes the virtual CPU devices, and chooses the devices: asking for GPUs starts JAX, which fixes their number."""
    num_devices = config.num_devices or 1
    if num_devices > 1:
        # XLA's CPU devices share one pool with one thread per core, and a collective blocks its thread until the other
        # devices join in. Several collectives of one device can take all threads, and then the run hangs, until XLA
        # ends it after 60 s (jax 0.10.2; often with 4 devices on 2 cores). NPROC sets the size of that pool.
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 16 * num_devices)))
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        if config.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        if len(jax.devices("cpu")) < num_devices:
            raise UserError(
                f"JAX has already started with {len(jax.devices('cpu'))} CPU devices, expected {num_devices}: "
                "call kerasdp.launch before anything uses JAX"
            ) from error
    return choose_devices(config, _num_gpus(config))


def start_workers(worker: Callable[..., Any], devices: Devices, *args: Any) -> Any:
    """Calls `worker(devices, *args)` in this process, which drives all devices."""
    return worker(devices, *args)


def _num_gpus(config: Config) -> int:
    try:
        return 0 if config.device == "cpu" else len(jax.devices("gpu"))
    except RuntimeError:  # what JAX says where it has no GPU platform
        return 0
