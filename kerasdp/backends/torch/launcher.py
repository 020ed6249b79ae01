"""PyTorch: starts one process per device."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kerasdp.backends.torch.elastic import start_elastic_workers
from kerasdp.config import HANG_TIMEOUT, Config
from kerasdp.runtime.cluster import Cluster
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.linked_processes import current_link
from kerasdp.runtime.workers import run_workers

# What each process imports, and needs the most time for.
_PRELOAD = ["torch", "keras", "kerasdp.training.runner", "kerasdp.backends.torch.data_parallel"]


def start_workers(worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any]) -> Any:
    """Calls `worker(devices, settings, train)` in a process for each device; returns what rank 0 returned.

    A single device needs no other process: `worker` then runs in this one. Otherwise this process watches over them.

    Raises:
        UserError: if `train` refers to something that cannot be sent to other processes.
        RunError: the error of the first worker that failed. All others are ended first.
    """
    cluster, num_local = devices.cluster, devices.of_process
    if cluster is not None and cluster.is_elastic:
        return start_elastic_workers(worker, devices, settings, train)
    if num_local == 1:
        if cluster is not None:
            os.environ.update(_variables(cluster, 0, 1))
        return worker(devices, settings, train)
    first = 0 if cluster is None else num_local * cluster.process
    threads = {name: os.environ.get(name, str(num_threads(num_local))) for name in _OF_THREADS}
    return run_workers(
        _rank,
        (worker, devices, settings, train),
        names=[f"rank {first + number}" for number in range(num_local)],
        variables=lambda number: threads | _variables(cluster, number, num_local),
        # Forked from a process that has imported them, unless there are GPUs, which such a process may have looked for;
        # on macOS what torch loads may have begun threads.
        preload=None if torch.cuda.device_count() or sys.platform != "linux" else _PRELOAD,
        timeout=HANG_TIMEOUT if settings.hang_timeout is None else settings.hang_timeout or None,
    )


# The processes share the cores; torch would give each of them all, and Inductor (2.13) up to 32 processes besides.
_OF_THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


def num_threads(num_local: int) -> int:
    """Returns how many threads each of so many processes of this machine has."""
    return max(1, (os.cpu_count() or 1) // num_local)


def _variables(cluster: Cluster | None, number: int, num_local: int) -> dict[str, str]:
    """Returns what says which rank a process is, as torchrun does; `number`: of the process on this machine."""
    if cluster is not None and num_local == 1:  # which another program has started
        of_machine, numbers = (cluster.local_process, cluster.local_processes), (cluster.process, cluster.num_processes)
    else:
        of_machine = number, num_local
        hosts, host = (cluster.num_processes, cluster.process) if cluster else (1, 0)
        numbers = host * num_local + number, hosts * num_local
    address, port = cluster.address if cluster else ("127.0.0.1", 0)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: str(value) for name, value in zip(names, (*numbers, *of_machine, address, port))}


def _rank(worker: Callable[..., Any], *args: Any) -> Any:
    """Runs in the process of a rank."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which was read where torch was imported
    result = worker(*args)
    dist.destroy_process_group()
    if (link := current_link()) is not None:
        link.leave()  # a process that was forked calls no `atexit` functions
    return result
