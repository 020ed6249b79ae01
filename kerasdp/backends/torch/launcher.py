"""Starts one process per device through torch's own elastic launcher, and finds the error that ended a run."""

import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kerasdp import errors
from kerasdp.config import HANG_TIMEOUT, Config
from kerasdp.runtime import messages, rank_files, signals
from kerasdp.runtime.cluster import Cluster, worker_cluster
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.host_link import SECONDS_TO_JOIN
from kerasdp.runtime.modules import not_run_again
from kerasdp.runtime.processes import end_with_parent, how_it_ended, start_processes_as_usual
from kerasdp.runtime.sending import sent
from kerasdp.runtime.watch import Watch

# The launcher looks this often for workers that have ended; of those that ended since its last look it sees any one.
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_SEE_ANOTHER_END = 10 * _SECONDS_BETWEEN_LOOKS
# Where machines come and go: a machine that is silent for 3 times 3 s is gone (it would be 3 times 5 s); after the
# fewest have come, others may for 5 s more (it would be 30 s). How often a machine may go, where nobody says.
_OF_ELASTIC_HOSTS = {"keep_alive_interval": 3, "keep_alive_max_attempt": 3, "last_call_timeout": 5}
_RESTARTS_OF_ELASTIC_HOSTS = 100


def start_workers(
    worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any], folder: str | None
) -> Any:
    """Calls `worker(devices, settings, train, folder)` in a process for each device; returns what rank 0 returned.

    A single device needs no other process: `worker` then runs in this one. Otherwise this process watches over them,
    and the folder is another one.

    Raises:
        UserError: if `train` refers to something that cannot be sent to other processes.
        RunError: the error of the first worker that failed. All others are ended first.
    """
    cluster = devices.cluster
    is_elastic = cluster is not None and cluster.is_elastic
    if devices.of_process == 1 and not is_elastic:
        if cluster is not None:
            _number_rank(cluster)
        return worker(devices, settings, train, folder)
    _prepare_launcher(devices.of_process)
    temporary = tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True)
    with sent(train) as train, not_run_again(), temporary as folder:
        launch_config = LaunchConfig(
            **_meeting_place(cluster, settings),
            nproc_per_node=devices.of_process,
            run_id="kerasdp",
            # When one has died, the others get a signal, which they may take for the scheduler's, and so finish a step.
            shutdown_timeout=5,
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
            monitor_interval=_SECONDS_BETWEEN_LOOKS,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        timeout = HANG_TIMEOUT if settings.hang_timeout is None else settings.hang_timeout or None
        # Ranks that come and go are watched over by each other alone.
        watch = Watch(folder, 0 if is_elastic else devices.of_process, timeout)
        arguments = folder, worker, devices, settings, train, None if is_elastic else folder
        try:
            with signals.passed_on(multiprocessing.active_children), watch:
                results = elastic_launch(launch_config, _recorded)(*arguments)
                result = results[min(results)]  # torch (2.13) has them in the order in which they came
        except ChildFailedError as error:
            records = rank_files.read_errors(folder)
            is_told = any(errors.from_name(record["name"], "") for record in records.values())
            failed = [rank % devices.of_process for rank in error.failures]  # on this machine
            if (explanation := watch.explanation(failed, is_told)) is not None:
                raise explanation from None
            signals.leave_as(error.get_first_failure()[1].exitcode)
            raise _first_error(records, error, devices.of_process) from None
        except SignalException as error:  # the agent has ended the workers
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    if isinstance(result, SystemExit):
        raise result
    return result


def _prepare_launcher(num_local: int) -> None:
    # Otherwise a restarted group reads the addresses of the dead one and hangs (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The processes share the cores; torch would give each of them all, and Inductor (2.13) up to 32 processes besides.
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // num_local)))
    # It logs every failure with its whole traceback; the one that matters is raised by `start_workers`.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)


def _meeting_place(cluster: Cluster | None, settings: Config) -> dict[str, Any]:
    """Returns where the launchers of all machines meet, as arguments of `LaunchConfig`."""
    if cluster is None:
        return {
            "min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0",  # a free port
            "local_addr": "127.0.0.1",
            "max_restarts": 0,  # `kerasdp.runtime.supervisor` does that, for all backends
        }  # fmt: skip
    own = messages.own_address(cluster.address, settings.interface)
    common = {"rdzv_endpoint": cluster.coordinator, "local_addr": own, "max_nodes": cluster.num_processes}
    timeout = int(SECONDS_TO_JOIN)
    if not cluster.is_elastic:  # the machines keep the numbers that they were given
        return common | {
            "min_nodes": cluster.num_processes,
            "rdzv_backend": "static",
            "rdzv_configs": {"rank": cluster.process, "timeout": timeout},
            "max_restarts": 0,
        }
    return common | {
        "min_nodes": cluster.fewest,
        "rdzv_backend": "c10d",
        "rdzv_configs": {"is_host": cluster.process == 0, "join_timeout": timeout, **_OF_ELASTIC_HOSTS},
        "max_restarts": settings.max_restarts or _RESTARTS_OF_ELASTIC_HOSTS,
    }


def _number_rank(cluster: Cluster) -> None:
    """Numbers this process as torch's own launcher does, where another program has started it."""
    host, port = cluster.address
    numbers = {
        "RANK": cluster.process, "WORLD_SIZE": cluster.num_processes, "LOCAL_RANK": cluster.local_process,
        "LOCAL_WORLD_SIZE": cluster.local_processes, "MASTER_ADDR": host, "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(number) for name, number in numbers.items()})


def _recorded(folder: str, worker: Callable[..., Any], devices: Devices, settings: Config, *args: Any) -> Any:
    """Runs the worker, and records what it raises at once, before the other ranks can notice.

    They fail, too, as soon as this one leaves, and torch records only the first error that it sees.
    """
    end_with_parent()  # torch (2.13) sends SIGINT, which what waits in native code does not heed
    start_processes_as_usual()
    # Ctrl-C reaches every process of a terminal, and then again through the launcher: leave at the first, quietly.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    local_rank = int(os.environ["LOCAL_RANK"])
    if devices.cluster is not None and devices.cluster.is_elastic:
        rank_files.forget_errors(folder, local_rank)  # of former starts
        devices = dataclasses.replace(devices, count=int(os.environ["WORLD_SIZE"]), cluster=worker_cluster())
        settings = dataclasses.replace(settings, resume=settings.keeps_checkpoints)
        settings.check_replicas(settings.num_replicas(devices.count))
    try:
        result = worker(devices, settings, *args)
    except SystemExit as end:
        if signals.noted() is not None:
            raise
        if end.code:
            rank_files.write_error(folder, local_rank, end, end.code)
            raise SystemExit(1) from None  # what it says is said once, where the run was started
        result = end  # of all ranks
    except Exception as error:
        rank_files.write_error(folder, local_rank, error, str(error))
        if not isinstance(error, errors.RunError):
            # Maybe because another rank was killed, which records nothing: the launcher is to see that one's end first.
            time.sleep(_SECONDS_TO_SEE_ANOTHER_END)
        # The process group is not left in order: that would wait for ranks that wait for this one. Nor by the error,
        # which torch (2.13) would write into a file that nobody removes.
        raise SystemExit(1) from None
    dist.destroy_process_group()
    return result


def _first_error(
    records: dict[int, dict[str, Any]], error: ChildFailedError, num_local: int
) -> errors.RunError | SystemExit:
    rank, failure = error.get_first_failure()
    # Killed, by the system for its memory say, or crashed, or it left by `os._exit`: it could not record anything.
    if not records or (
        rank % num_local not in records and failure.exitcode not in (-signal.SIGTERM, 128 + signal.SIGTERM)
    ):
        return errors.WorkerError(f"rank {rank} {how_it_ended(failure.exitcode)}")
    first_of_machine = rank - rank % num_local
    none = (0, {"name": "", "message": "", "frames": "for an unknown reason"})
    first, record = next(iter(records.items()), none)
    if record["name"] == SystemExit.__name__:
        first += first_of_machine
        print(f"rank {first} called sys.exit({record['message']!r})", file=sys.stderr, flush=True)
        return SystemExit(record["message"])
    known = errors.from_name(record["name"], record["message"])
    if known and 0 in records:  # if all ranks raise, rank 0 may know more: which checkpoint is left, say
        known = errors.from_name(records[0]["name"], records[0]["message"]) or known
    return known or errors.WorkerError(f"rank {first_of_machine + first} failed\n{record['frames']}".rstrip())
