"""JAX: joins this process with the processes of other machines, and exchanges values with them.

What they exchange goes through the key-value store of JAX's coordination service, which process 0 runs: any thread may
use it, and it needs no program on the devices.
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

# A process that is silent for so long is dead for JAX, which then ends the others.
_SECONDS_OF_HEARTBEAT = 10
# A process that fails stays so long: with process 0 the service ends, and the others, which may have the same error.
_SECONDS_TO_STAY = 2.0
_NEVER = 10**6  # seconds: longer than any run
_OF_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_INITIALIZE = "jax.distributed.initialize"


def find_cluster(environment: Environment = os.environ) -> Cluster | None:
    """Returns which of several processes of JAX this is, without joining them; None: JAX knows of no others.

    It is what a call of `jax.distributed.initialize` has said, then $JAX_COORDINATOR_ADDRESS with $JAX_NUM_PROCESSES
    and $JAX_PROCESS_ID, then what JAX's own detection finds.

    Raises:
        UserError: if the variables are half set.
    """
    if jax.distributed.is_initialized():
        process, number = private.joined()
        found = Cluster(source=_INITIALIZE, num_processes=number, process=process)
    elif "JAX_NUM_PROCESSES" in environment or "JAX_PROCESS_ID" in environment:
        if missing := [name for name in _OF_JAX if name not in environment]:
            raise UserError(f"{', '.join(_OF_JAX)} go together. Received: no {missing[0]}; set it, too")
        number, process = (int(environment[name]) for name in _OF_JAX[1:])
        found = Cluster(source=_OF_JAX[0], num_processes=number, process=process)
        if process >= number:
            raise UserError(f"JAX_PROCESS_ID: expected a number below JAX_NUM_PROCESSES={number}. Received: {process}")
    elif (detected := private.detected_cluster()) is not None:
        found = Cluster(**detected)
    else:
        return None
    return found if found.num_processes > 1 else None


def join(cluster: Cluster, config: Config) -> None:
    """Joins the others, once in a program, and compares what all were given. Call before JAX starts.

    Raises:
        UserError: if they do not come, or differ.
    """
    if not jax.distributed.is_initialized():
        if cluster.source == _INITIALIZE:
            raise UserError(
                f"{_INITIALIZE} was called before, and the run needs another process, for --max_restarts, "
                "--hang_timeout or more devices: leave that call out"
            )
        # SIGTERM is ours: JAX's own service (0.10.2) would keep it.
        jax.config.update("jax_enable_preemption_service", False)
        address = os.environ.get(_OF_JAX[0], "")
        if address.startswith(("127.", "localhost:")):  # by default the coordinator listens at all addresses
            os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", address)
        own_gpus = None
        if config.num_devices is not None:  # else those that JAX gives a process of this launcher
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
                f"the {cluster.num_processes} processes of {cluster.source} do not meet: {reason}"
            ) from error
    require_same(JaxProcesses(config), config)


@contextlib.contextmanager
def ending_soon(cluster: Cluster | None) -> Iterator[None]:
    """Lets a process that fails end soon: at the end of a program JAX (0.10.2) waits five minutes for the others.

    These find its connections closed, or no more signs of life of it. `cluster`: of the run; None: it is this process's
    alone.
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


_number_of_exchange = itertools.count()  # the same on all: they begin the same runs, in the same order


class JaxProcesses:
    """Exchanges values as `kerasdp.processes.ranks.Processes` says, for one run."""

    def __init__(self, config: Config):
        self.rank, self.num_processes = private.joined()
        self._seconds = HANG_TIMEOUT if config.hang_timeout is None else config.hang_timeout or _NEVER
        self._name, self._num_scatters = f"kerasdp/{next(_number_of_exchange)}", 0
        # By kind of exchange: how many there were.
        self._rounds = collections.Counter[str]()

    def all_gather_object(self, value: T) -> list[T]:
        """See `Processes`."""
        return self._take("gather", self._give("gather", value))

    def all_reduce_max_delayed(self, number: int) -> int:
        """See `Processes`."""
        current = self._give("delayed", number)
        return max(self._take("delayed", current - 1)) if current else 0

    def any_rank(self, flag: bool) -> bool:
        """See `Processes`."""
        return any(self.all_gather_object(flag))

    def open_scatter(self) -> "JaxScatter":
        """See `Processes`."""
        self._num_scatters += 1
        return JaxScatter(self, f"{self._name}/scatter-{self._num_scatters}")

    def _give(self, kind: str, value: Any) -> int:
        """Gives a value to all; returns the number of the round."""
        current, self._rounds[kind] = self._rounds[kind], self._rounds[kind] + 1
        private.key_values().key_value_set_bytes(f"{self._name}/{kind}/{current}/{self.rank}", pickle.dumps(value))
        # Where it is delayed, the last call has taken what is two rounds old. So the others had come to that round, and
        # had taken what is four rounds old.
        if current > 3:
            private.key_values().key_value_delete(f"{self._name}/{kind}/{current - 4}/{self.rank}")
        return current

    def _take(self, kind: str, number: int) -> list[Any]:
        """Returns the values of a round, in the order of the ranks."""
        folder = f"{self._name}/{kind}/{number}"
        there = dict(private.key_values().key_value_dir_get_bytes(folder))
        names = [f"{folder}/{rank}" for rank in range(self.num_processes)]
        return [pickle.loads(there[name] if name in there else self.wait_for(name)) for name in names]

    def wait_for(self, name: str) -> bytes:
        """Waits for a value; the last part of its name is the number of the process that gives it."""
        try:
            return private.key_values().blocking_key_value_get_bytes(name, int(1000 * self._seconds))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise WorkerError(
                f"process {name.rpartition('/')[2]} has not come for {self._seconds:g} s to where process {self.rank} "
                "waits for it; its own output says why; a higher --hang_timeout waits longer"
            ) from error


class JaxScatter:
    """Hands out values as `kerasdp.processes.ranks.Scatter` says. They stay with process 0 until they are taken."""

    def __init__(self, processes: JaxProcesses, name: str):
        self.rank, self.num_processes = processes.rank, processes.num_processes
        self._processes, self._name = processes, name
        # By number of a call: how many there were.
        self._calls = collections.Counter[int]()

    def __call__(self, values: list[Any], number: int) -> Any:
        """See `kerasdp.processes.ranks.Scatter`."""
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
