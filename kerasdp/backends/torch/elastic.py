"""PyTorch: starts one process per device on machines that come and go, through torch's own elastic launcher."""

import dataclasses
import datetime
import hashlib
import hmac
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kerasdp import errors
from kerasdp.backends.torch.private import leave_process_group
from kerasdp.config import Config
from kerasdp.runtime import addresses, outcome, signals
from kerasdp.runtime.addresses import SECONDS_TO_JOIN
from kerasdp.runtime.cluster import worker_cluster
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.door import secret
from kerasdp.runtime.outcome import Outcome, Place
from kerasdp.runtime.sending import not_run_again, sent
from kerasdp.runtime.workers import begin_worker

# The launcher looks this often for workers that have ended; of those that ended since its last look it sees any one.
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_SEE_ANOTHER_END = 10 * _SECONDS_BETWEEN_LOOKS
# A machine that is silent for 3 times 3 s is gone (it would be 3 times 5 s); after the fewest have come, others may for
# 5 s more (it would be 30 s). How often a machine may go, where nobody says.
_SECONDS_BETWEEN_SIGNS, _NUM_SIGNS, _SECONDS_FOR_OTHERS = 3, 3, 5
_NUM_RESTARTS = 100
# What an error says that comes of another machine's end: Gloo has no class of its own for it (torch 2.13).
_OF_ANOTHER = re.compile("gloo|connection|time[d]? ?out", re.IGNORECASE)
_RENDEZVOUS = "kerasdp"


def start_elastic_workers(
    worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any]
) -> Any:
    """Calls `worker(devices, settings, train)` in a process for each device; returns what the first one returned.

    When a machine comes or goes, the processes of all start again, from the last checkpoint. A machine goes that gets a
    signal, or on which `train` raises an error that is not of another machine's end: it would be raised again.

    Raises:
        UserError: if `train` refers to something that cannot be sent to other processes.
        RunError: the error of the first worker that failed, when this machine goes or no restart is left; the machine
            has left where all meet.
    """
    # Otherwise a restarted group reads the addresses of the dead one and hangs (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # It logs every failure with its whole traceback; the one that matters is raised here.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register(_RENDEZVOUS, _make_handler)
    temporary = tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True)
    with sent(train) as train, not_run_again(), temporary as folder:
        try:
            with signals.passed_on(multiprocessing.active_children):
                launcher = elastic_launch(_launch_config(devices, settings, folder), _recorded)
                results = launcher(folder, worker, devices, settings, train)
                return results[min(results)]  # torch (2.13) has them in the order in which they came
        except ChildFailedError as error:
            signals.leave_as(error.get_first_failure()[1].exitcode)
            raise _first_error(folder, error, devices.of_process) from None
        except SignalException as error:  # the agent has ended the workers
            if isinstance(error, _Leaving) and error.outcome is not None:
                raise error.outcome.as_error("a process of this machine") from None
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        except RendezvousConnectionError as error:
            meets = f"the machine at {devices.cluster and devices.cluster.coordinator}, where all meet"
            raise errors.WorkerError(f"{meets}, has left; start all again, with --resume") from error
        except RendezvousError as error:  # those that do not come, or whose secret is another
            raise errors.UserError(f"--hosts={settings.hosts}: {error or 'too few have come'}") from error


def _launch_config(devices: Devices, settings: Config, folder: str) -> LaunchConfig:
    cluster = devices.cluster
    assert cluster is not None  # noqa: S101
    return LaunchConfig(
        rdzv_backend=_RENDEZVOUS,
        rdzv_endpoint=cluster.coordinator,
        rdzv_configs={"is_host": cluster.process == 0, "folder": folder, "of_process": devices.of_process},
        local_addr=addresses.own_address(cluster.address, settings.interface),
        min_nodes=cluster.fewest or 1,
        max_nodes=cluster.num_processes,
        max_restarts=settings.max_restarts or _NUM_RESTARTS,
        nproc_per_node=devices.of_process,
        # Others can write into torch's store, but not where they do not know the name.
        run_id=f"kerasdp-{hmac.new(secret(), b'rendezvous', hashlib.sha256).hexdigest()}",
        # When one has died, the others get a signal, which they may take for the scheduler's, and so finish a step.
        shutdown_timeout=5,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
        monitor_interval=_SECONDS_BETWEEN_LOOKS,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )


class _SignedBackend(C10dRendezvousBackend):
    """Keeps the state of a rendezvous, which torch (2.13) unpickles, so that only those who know the secret write it.

    torch's own keeps it as it comes, in a server that anybody may write to.
    """

    @property
    def name(self) -> str:
        """Returns the name under which it is registered: torch (2.13) refuses a handler of another one."""
        return _RENDEZVOUS

    def get_state(self) -> tuple[bytes, Any] | None:
        """See `RendezvousBackend`."""
        found = super().get_state()
        return found and (_opened(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See `RendezvousBackend`."""
        found = super().set_state(_digest(state) + state, token)
        return found and (_opened(found[0]), *found[1:])


def _digest(state: bytes) -> bytes:
    return hmac.new(secret(), b"state" + state, hashlib.sha256).digest()


def _opened(signed: bytes) -> bytes:
    size = hashlib.sha256().digest_size
    if not hmac.compare_digest(signed[:size], _digest(signed[size:])):
        raise RendezvousStateError("written by a program that does not know KERASDP_SECRET")
    return signed[size:]


class _Leaving(SignalException):
    """This machine meets the others no more: as if by a signal, after which torch (2.13) lets these meet again."""

    def __init__(self, outcome: Outcome | None, number: int):
        super().__init__("", signal.Signals(number))
        self.outcome = outcome


class _Meeting(DynamicRendezvousHandler):
    """Where this machine meets the others, before the first start of its processes and after each of their ends."""

    places: tuple[Place, ...] = ()

    def next_rendezvous(self) -> Any:
        """See `RendezvousHandler`."""
        ended = (outcome.read(place) for place in self.places)
        failed = sorted((each for each in ended if each is not None and each.frames), key=lambda each: each.time)
        if (number := signals.noted()) is not None:
            saved = (each for each in failed if isinstance(each.error, errors.PreemptedError))
            raise _Leaving(next(saved, None), number)
        others = (errors.WorkerError, errors.PreemptedError)
        own = (each for each in failed if not each.is_echo and not isinstance(each.error, others))
        if (first := next(own, None)) is not None:
            raise _Leaving(first, signal.SIGTERM)
        try:
            return super().next_rendezvous()
        except SystemExit:  # of a signal that came meanwhile, when there was no process to pass it on to
            raise _Leaving(None, signals.noted() or signal.SIGTERM) from None


def _make_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    host, _, port = params.endpoint.rpartition(":")
    is_host = bool(params.get_as_bool("is_host"))
    options: dict[str, Any] = {}
    if is_host:  # at this machine's address alone; torch's own would listen at all
        options["master_listen_fd"] = addresses.listen(host, int(port)).detach()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]

            host, int(port), is_master=is_host, wait_for_workers=False,
            timeout=datetime.timedelta(seconds=SECONDS_TO_JOIN), **options,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:  # torch's DistNetworkError, after its time-out
        raise RendezvousError(str(error)) from error
    timeout = RendezvousTimeout(
        join=datetime.timedelta(seconds=SECONDS_TO_JOIN), last_call=datetime.timedelta(seconds=_SECONDS_FOR_OTHERS)
    )
    found: _Meeting = _Meeting.from_backend(
        params.run_id, store, _SignedBackend(store, params.run_id), params.min_nodes, params.max_nodes,
        params.local_addr, timeout, _SECONDS_BETWEEN_SIGNS, _NUM_SIGNS,
    )  # fmt: skip
    folder, number = params.get("folder"), params.get("of_process")
    found.places = tuple(Place(folder, rank, number) for rank in range(number))
    return found


def _recorded(folder: str, worker: Callable[..., Any], devices: Devices, settings: Config, *args: Any) -> Any:
    """Runs the worker, and records what it raises at once, before the other ranks can notice.

    They fail, too, as soon as this one leaves, and torch records only the first error that it sees.
    """
    place = Place(folder, int(os.environ["LOCAL_RANK"]), devices.of_process, is_watched=False)
    former = outcome.read(place)
    if former is not None and former.frames and place.number == 0:  # torch (2.13) says nothing of why it starts again
        reason = outcome.line_of(former.as_error("a process of this machine"))
        print(f"{reason}: all processes start again", file=sys.stderr, flush=True)
    # Ends with the launcher: torch (2.13) sends SIGINT, which native code that waits does not notice.
    begin_worker(place)
    devices = dataclasses.replace(devices, count=int(os.environ["WORLD_SIZE"]), cluster=worker_cluster())
    settings = dataclasses.replace(settings, resume=settings.keeps_checkpoints)
    settings.check_replicas(settings.num_replicas(devices.count))
    try:
        result = worker(devices, settings, *args)
    except SystemExit as end:
        if signals.noted() is None:
            outcome.write_error(end)
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, errors.DeviceError) else error
        is_ours = isinstance(cause, errors.RunError)
        is_anothers = isinstance(cause, dist.DistError) or _OF_ANOTHER.search(str(cause)) is not None
        outcome.write_error(error, is_echo=is_anothers and not is_ours)
        if not is_ours:
            # Maybe because another rank was killed, which records nothing: the launcher is to see that one's end first.
            time.sleep(_SECONDS_TO_SEE_ANOTHER_END)
        # The process group is not left in order: that would wait for ranks that wait for this one. Nor by the error,
        # which torch (2.13) would write into a file that nobody removes.
        raise SystemExit(1) from None
    leave_process_group()
    return result


def _first_error(folder: str, error: ChildFailedError, num_local: int) -> BaseException:
    rank, failure = error.get_first_failure()
    known = {number: outcome.read(Place(folder, number, num_local)) for number in range(num_local)}
    failed = {number: each for number, each in known.items() if each is not None and each.frames}
    is_asked = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    # Killed, by the system for its memory say, or crashed, or it left by `os._exit`: it could not record anything.
    if not failed or (rank % num_local not in failed and not is_asked):
        return errors.WorkerError(f"rank {rank} {outcome.how_it_ended(failure.exitcode)}")
    first = min(failed, key=lambda number: (failed[number].is_echo, failed[number].time))
    return failed[first].as_error(f"rank {rank - rank % num_local + first}")
