"""Connects this JAX process to processes on other machines, and exchanges values between the processes.

The values are exchanged through the key-value store of JAX's coordination service, which runs in process 0. An exchange
works in any thread, and runs no program on the devices.
"""

import atexit
import collections
import contextlib
import itertools
import os
import pickle
import sys
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import jax

from kerasdp.backends.jax import private
from kerasdp.config import HANG_TIMEOUT, Config
from kerasdp.errors import PreemptedError, UserError, WorkerError
from kerasdp.processes.error_text import lost_process
from kerasdp.processes.ranks import Cluster, Environment, require_same

T = TypeVar("T")

# JAX treats a process without a heartbeat for so long as dead, and ends the other processes.
_SECONDS_OF_HEARTBEAT = 10
# A process that fails stays alive for so long. The service ends with process 0, and with the service the other
# processes, which may be about to report the same error.
_SECONDS_TO_STAY = 2.0
_NEVER = 10**6  # seconds: longer than any run
_OF_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_INITIALIZE = "jax.distributed.initialize"


def find_cluster(environment: Environment = os.environ) -> Cluster | None:
    """Returns the `Cluster` of this process, or None if there is only one JAX process.

    The function does not connect the processes. The information comes from the first of these sources that is
    available: an earlier call of `jax.distributed.initialize`, the variables $JAX_COORDINATOR_ADDRESS,
    $JAX_NUM_PROCESSES and $JAX_PROCESS_ID, or JAX's cluster detection.

    Raises:
        UserError: if only some of the variables are set, or if $JAX_PROCESS_ID is not below $JAX_NUM_PROCESSES.
    """
    if jax.distributed.is_initialized():
        process, number = private.joined()
        found = Cluster(source=_INITIALIZE, num_processes=number, process=process)
    elif "JAX_NUM_PROCESSES" in environment or "JAX_PROCESS_ID" in environment:
        if missing := [name for name in _OF_JAX if name not in environment]:
            raise UserError(f"{', '.join(_OF_JAX)}: expected all three. Received: no {missing[0]}; set it, too")
        number, process = (int(environment[name]) for name in _OF_JAX[1:])
        found = Cluster(source=_OF_JAX[0], num_processes=number, process=process)
        if process >= number:
            raise UserError(f"JAX_PROCESS_ID: expected 0 to {number - 1}. Received: {process}; check JAX_NUM_PROCESSES")
    elif (detected := private.detected_cluster()) is not None:
        found = Cluster(**detected)
    else:
        return None
    return found if found.num_processes > 1 else None


def join(cluster: Cluster, config: Config) -> None:
    """Connects this process to the other processes, and checks that all processes have the same settings.

    JAX must not be initialized yet. A program connects only once.

    Raises:
        UserError: if the processes do not connect, if their settings differ, or if the program called
            `jax.distributed.initialize` although the run needs a new process.
    """
    if not jax.distributed.is_initialized():
        if cluster.source == _INITIALIZE:
            raise UserError(
                f"{_INITIALIZE} was called before kerasdp.launch, but this run needs a new process "
                "for --max_restarts, --hang_timeout or more devices than JAX has; remove that call"
            )
        # kerasdp handles SIGTERM. JAX's preemption service (0.10.2) would catch it first.
        jax.config.update("jax_enable_preemption_service", False)
        address = os.environ.get(_OF_JAX[0], "")
        if address.startswith(("127.", "localhost:")):  # by default the coordinator listens at all addresses
            os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", address)
        own_gpus = None
        if config.num_devices is not None:  # else the GPUs that JAX assigns to a process of this launcher
            own_gpus = [cluster.local_process * config.num_devices + number for number in range(config.num_devices)]
        try:
            jax.distributed.initialize(
                num_processes=cluster.num_processes,
                process_id=cluster.process,
                local_device_ids=own_gpus,
                cluster_detection_method="deactivate" if cluster.source == _OF_JAX[0] else None,
                heartbeat_timeout_seconds=_SECONDS_OF_HEARTBEAT,
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"the {cluster.num_processes} processes of {cluster.source} cannot connect: {reason}; check firewalls"
            ) from error
    require_same(JaxProcesses(config), config)


@contextlib.contextmanager
def ending_soon(cluster: Cluster | None) -> Iterator[None]:
    """Returns a context that makes a failed process end within seconds.

    Without this context, JAX (0.10.2) waits five minutes for the other processes when a program ends. The other
    processes notice the failure, because connections close or heartbeats are missing.

    Args:
        cluster: the place of this process among the processes of the run, or None for a single process.
    """
    try:
        yield
    except BaseException as error:
        is_end = isinstance(error, SystemExit) and not error.code
        if cluster is not None and not is_end and not isinstance(error, PreemptedError | KeyboardInterrupt):
            lost = lost_process(error)
            time.sleep(_SECONDS_TO_STAY)
            atexit.register(_leave, getattr(lost or error, "exit_code", 1))
            if lost is not None:
                raise lost from error
        raise


def _leave(exit_code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


_number_of_exchange = itertools.count()  # the same on all processes: they start the same runs, in the same order


class JaxProcesses:
    """Exchanges values between the processes of one run. Implements `kerasdp.processes.ranks.Processes`."""

    def __init__(self, config: Config):
        self.rank, self.num_processes = private.joined()
        self._seconds = HANG_TIMEOUT if config.hang_timeout is None else config.hang_timeout or _NEVER
        self._name, self._num_scatters = f"kerasdp/{next(_number_of_exchange)}", 0
        # The number of exchanges so far, by kind.
        self._rounds = collections.Counter[str]()

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the value of each process, in the order of the ranks."""
        return self._take("gather", self._give("gather", value))

    def all_reduce_max_delayed(self, number: int) -> int:
        """Returns the maximum of the numbers that the ranks passed to the previous call. The first call returns 0."""
        current = self._give("delayed", number)
        return max(self._take("delayed", current - 1)) if current else 0

    def any_rank(self, flag: bool) -> bool:
        """Returns whether `flag` is True on at least one rank."""
        return any(self.all_gather_object(flag))

    def open_scatter(self) -> "JaxScatter":
        """Returns a new scatter. Its messages never mix with the messages of another scatter."""
        self._num_scatters += 1
        return JaxScatter(self, f"{self._name}/scatter-{self._num_scatters}")

    def _give(self, kind: str, value: Any) -> int:
        """Stores this rank's value in the key-value store. Returns the number of this exchange.

        Args:
            kind: the kind of the exchange: `gather` or `delayed`. Exchanges of each kind are numbered from 0.
            value: the value of this rank.
        """
        current, self._rounds[kind] = self._rounds[kind], self._rounds[kind] + 1
        private.key_values().key_value_set_bytes(f"{self._name}/{kind}/{current}/{self.rank}", pickle.dumps(value))
        # With a delay, the last call has read the values of two rounds ago. So the other processes had reached that
        # round, and had read the values of four rounds ago.
        if current > 3:
            private.key_values().key_value_delete(f"{self._name}/{kind}/{current - 4}/{self.rank}")
        return current

    def _take(self, kind: str, number: int) -> list[Any]:
        """Returns the values of all processes in one exchange, in the order of the ranks.

        Args:
            kind: the kind of the exchange, as in `_give`.
            number: the number of the exchange, as `_give` returns it.
        """
        folder = f"{self._name}/{kind}/{number}"
        there = dict(private.key_values().key_value_dir_get_bytes(folder))
        names = [f"{folder}/{rank}" for rank in range(self.num_processes)]
        return [pickle.loads(there[name] if name in there else self.wait_for(name)) for name in names]

    def wait_for(self, name: str) -> bytes:
        """Waits until a process has stored a value in the key-value store. Returns the value.

        Args:
            name: the key of the value. The text after the last slash is the rank of the process that stores the value.

        Raises:
            WorkerError: if the process does not store the value within the hang timeout.
        """
        try:
            return private.key_values().blocking_key_value_get_bytes(name, int(1000 * self._seconds))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise WorkerError(
                f"process {self.rank} has waited {self._seconds:g} s for process {name.rpartition('/')[2]}; read the "
                "output of that process, or use a higher --hang_timeout"
            ) from error


class JaxScatter:
    """Sends values from process 0 to all processes. Implements `kerasdp.processes.ranks.Scatter`.

    Process 0 holds the values until the other processes read them.
    """

    def __init__(self, processes: JaxProcesses, name: str):
        self.rank, self.num_processes = processes.rank, processes.num_processes
        self._processes, self._name = processes, name
        # The number of calls so far, by the number of the call.
        self._calls = collections.Counter[int]()

    def __call__(self, values: list[Any], number: int) -> Any:
        """Sends one value from process 0 to each process. Returns the value for this process. See `Scatter`."""
        folder = f"{self._name}/{number}/{self._calls[number]}"
        self._calls[number] += 1
        if self.rank == 0:
            for rank in range(1, self.num_processes):
                content = pickle.dumps(values[rank], protocol=5)
                private.key_values().key_value_set_bytes(f"{folder}/{rank}/0", content)
            return values[0]
        content = self._processes.wait_for(f"{folder}/{self.rank}/0")
        private.key_values().key_value_delete(f"{folder}/{self.rank}")
        return pickle.loads(content)
