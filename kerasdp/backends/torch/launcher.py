"""Starts one process per device through torch's own elastic launcher, and finds the error that ended a run."""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kerasdp import errors
from kerasdp.config import HANG_TIMEOUT, Config
from kerasdp.runtime import signals
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.modules import not_run_again
from kerasdp.runtime.processes import end_with_parent, how_it_ended, start_processes_as_usual
from kerasdp.runtime.sending import sent
from kerasdp.runtime.watch import ERROR, Watch

# The launcher looks this often for workers that have ended; of those that ended since its last look it sees any one.
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_SEE_ANOTHER_END = 10 * _SECONDS_BETWEEN_LOOKS


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
    if devices.count == 1:
        return worker(devices, settings, train, folder)
    # Otherwise a restarted group reads the addresses of the dead one and hangs (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # The processes share the cores; torch would give each of them all, and Inductor (2.13) up to 32 processes besides.
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // devices.count)))
    # It logs every failure with its whole traceback; the one that matters is raised below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    temporary = tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True)
    with sent(train) as train, not_run_again(), temporary as folder:
        launch_config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices.count,
            run_id="kerasdp",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a free port
            local_addr="127.0.0.1",
            max_restarts=0,  # `kerasdp.runtime.supervisor` does that, for all backends
            # When one has died, the others get a signal, which they may take for the scheduler's, and so finish a step.
            shutdown_timeout=5,
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
            monitor_interval=_SECONDS_BETWEEN_LOOKS,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        timeout = HANG_TIMEOUT if settings.hang_timeout is None else settings.hang_timeout or None
        watch = Watch(folder, devices.count, timeout)
        try:
            with signals.passed_on(multiprocessing.active_children), watch:
                result = elastic_launch(launch_config, _recorded)(folder, worker, devices, settings, train, folder)[0]
        except ChildFailedError as error:
            records = _records(folder)
            is_told = any(errors.from_name(record["name"], "") for record in records.values())
            if (explanation := watch.explanation(error.failures, is_told)) is not None:
                raise explanation from None
            signals.leave_as(error.get_first_failure()[1].exitcode)
            raise _first_error(records, error) from None
        except SignalException as error:  # the agent has ended the workers
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
    if isinstance(result, SystemExit):
        raise result
    return result


def _recorded(folder: str, worker: Callable[..., Any], *args: Any) -> Any:
    """Runs the worker, and records what it raises at once, before the other ranks can notice.

    They fail, too, as soon as this one leaves, and torch records only the first error that it sees.
    """
    end_with_parent()  # torch (2.13) sends SIGINT, which what waits in native code does not heed
    start_processes_as_usual()
    # Ctrl-C reaches every process of a terminal, and then again through the launcher: leave at the first, quietly.
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        result = worker(*args)
    except SystemExit as end:
        if signals.noted() is not None:
            raise
        if end.code:
            _record(folder, end, end.code)
            raise SystemExit(1) from None  # what it says is said once, where the run was started
        result = end  # of all ranks
    except Exception as error:
        _record(folder, error, str(error))
        if not isinstance(error, errors.RunError):
            # Maybe because another rank was killed, which records nothing: the launcher is to see that one's end first.
            time.sleep(_SECONDS_TO_SEE_ANOTHER_END)
        # The process group is not left in order: that would wait for ranks that wait for this one. Nor by the error,
        # which torch (2.13) would write into a file that nobody removes.
        raise SystemExit(1) from None
    dist.destroy_process_group()
    return result


def _record(folder: str, error: BaseException, message: Any) -> None:
    record = {"name": type(error).__name__, "message": message, "frames": traceback.format_exc()}
    with open(os.path.join(folder, f"{time.time_ns()}-{os.environ['RANK']}{ERROR}"), "w") as file:
        json.dump(record, file, default=str)


def _records(folder: str) -> dict[str, dict[str, Any]]:
    """Returns what the ranks have recorded, by rank, the first one first."""
    records = {}
    for name in sorted(name for name in os.listdir(folder) if name.endswith(ERROR)):
        with contextlib.suppress(ValueError), open(os.path.join(folder, name)) as file:  # killed while it wrote
            records[name.removesuffix(ERROR).partition("-")[2]] = json.load(file)
    return records


def _first_error(records: dict[str, dict[str, Any]], error: ChildFailedError) -> errors.RunError | SystemExit:
    rank, failure = error.get_first_failure()
    # Killed, by the system for its memory say, or crashed, or it left by `os._exit`: it could not record anything.
    if not records or (str(rank) not in records and failure.exitcode not in (-signal.SIGTERM, 128 + signal.SIGTERM)):
        return errors.WorkerError(f"rank {rank} {how_it_ended(failure.exitcode)}")
    none = ("", {"name": "", "message": "", "frames": "for an unknown reason"})
    first, record = next(iter(records.items()), none)
    if record["name"] == SystemExit.__name__:
        print(f"rank {first} called sys.exit({record['message']!r})", file=sys.stderr, flush=True)
        return SystemExit(record["message"])
    known = errors.from_name(record["name"], record["message"])
    if known and "0" in records:  # if all ranks raise, rank 0 may know more: which checkpoint is left, say
        known = errors.from_name(records["0"]["name"], records["0"]["message"]) or known
    return known or errors.WorkerError(f"rank {first} failed\n{record['frames']}".rstrip())
