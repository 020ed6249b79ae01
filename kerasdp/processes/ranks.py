"""Finds the rank of this process, and checks that all ranks make the same calls in the same order."""

import contextlib
import dataclasses
import math
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

from kerasdp.config import Config, versions
from kerasdp.config.choices import choices_of
from kerasdp.errors import UserError
from kerasdp.processes import error_text, signals

T = TypeVar("T")
Environment = Mapping[str, str]

# Launchers that do not set torch's variables: a variable that shows that they run, and their number of processes. In a
# batch script of sbatch, srun has not started processes yet.
_OF_TASKS = {"srun": ("SLURM_STEP_ID", "SLURM_NTASKS"), "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}
_PAGE = "docs/many-machines.md"
_PLACES = {
    "torch": f"torch reads its rank from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; start it with "
    f"torchrun, which sets them: {_PAGE}",
    "jax": f"JAX reads its rank from SLURM, Kubernetes, Cloud TPU or JAX_COORDINATOR_ADDRESS: {_PAGE}",
    "tensorflow": "Keras 3 cannot train on several machines with TensorFlow; use --backend=torch or jax",
}
ALIKE = (
    "all ranks take part in fit, evaluate and predict: call them on every rank, in the same order; put only prints and "
    "files under `if runner.is_chief:`"
)
# Samples of the same data on two ranks may differ by round-off.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The place of this process among the processes of a run.

    Args:
        source: the launcher that the process was started by: `"torchrun"`, `"slurm"`, ...
        num_processes: number of processes of the run.
        process: number of this process, from 0.
        local_process: number of this process on its machine.
    """

    source: str
    num_processes: int
    process: int
    local_process: int = 0


def find_ranks(backend: str, environment: Environment = os.environ) -> Cluster | None:
    """Finds this process's torch rank in the environment that torchrun or another launcher sets; None if it is alone.

    Raises:
        UserError: if several processes were started, but each of them would train alone.
    """
    if has_ranks := "RANK" in environment and "WORLD_SIZE" in environment:
        source = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE"
        number, rank, local = (int(environment.get(name, 0)) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
        found = Cluster(source=source, num_processes=number, process=rank, local_process=local)
    else:
        of_tasks = ((source, names) for source, names in _OF_TASKS.items() if names[0] in environment)
        source, (_, name) = next(of_tasks, ("", ("", "")))
        found = Cluster(source=source, num_processes=int(environment.get(name, 1)), process=0)
    if found.num_processes == 1:
        return None
    if backend != "torch" or not has_ranks:
        raise UserError(
            f"{source} starts {found.num_processes} processes, and each would train alone with --backend={backend}: "
            f"{_PLACES[backend]}"
        )
    return found


class Scatter(Protocol):
    """Sends values from rank 0 to all processes of a run.

    Attributes:
        rank: number of this process, from 0.
        num_processes: number of processes.
    """

    rank: int
    num_processes: int

    def __call__(self, values: list[Any], number: int) -> Any:
        """Returns the value that rank 0 has for this process.

        All processes call it, in any thread. They make the calls of one sequence in the same order. On rank 0 it
        returns after all other ranks have received their values.

        Args:
            values: on rank 0, one value per rank. Ignored on other ranks.
            number: number of the sequence to which the call belongs. Sequences are independent of each other.
        """


class Processes(Protocol):
    """Collective operations between the processes of a run: each rank makes the same calls, in the same order.

    Attributes:
        rank: number of this process, from 0.
        num_processes: number of processes.
    """

    rank: int
    num_processes: int

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the values of all processes, in the order of the ranks."""

    def all_reduce_max_delayed(self, number: int) -> int:
        """Returns the maximum over the ranks of the numbers in the previous call. The delay avoids waiting."""

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""

    def open_scatter(self) -> Scatter | None:
        """Returns a scatter whose messages do not mix with other messages; None if there is only one process."""


def meet(processes: Processes, name: str = "", arguments: dict[str, Any] | None = None) -> None:
    """Waits until all ranks have made the same call, with the same arguments.

    Args:
        processes: the processes of the run.
        name: name of the call, as users write it. Empty: the end of the training function.
        arguments: descriptions of the arguments, as in `unlike`.

    Raises:
        UserError: if the ranks made different calls. All ranks raise the same error.
    """
    if processes.num_processes == 1:
        return
    own: Any = {
        "name": name,
        "line": error_text.calling_line(),
        "arguments": arguments or {},
        "host": socket.gethostname(),
    }
    given: list[Any] = processes.all_gather_object(own)
    first, *others = given
    has_hosts = len({each["host"] for each in given}) > 1
    ranks = [f"rank {rank}{' of ' + each['host'] if has_hosts else ''}" for rank, each in enumerate(given)]
    for rank, other in zip(ranks[1:], others):
        if (error := unlike(first, other, ranks[0], rank)) is not None:
            raise error


def require_same(processes: Processes, config: Config) -> None:
    """Raises the same `UserError` on all processes if a flag or a package version differs between them."""
    used = ("python", "kerasdp", "keras", "numpy", config.backend)
    fields = config.as_dict()
    choices = {f"--{each.flag}": fields[name] for name, each in choices_of(Config).items() if not each.of_host}
    given = choices | {package: version for package, version in versions().items() if package in used}
    meet(processes, "launch", {name: {"shown": str(value)} for name, value in given.items()})


@contextlib.contextmanager
def ending_alike(processes: Processes) -> Iterator[None]:
    """Waits for all other ranks at the end of the training function."""
    try:
        yield
    except SystemExit as end:
        if not end.code and signals.noted() is None:  # as at the end of a script
            meet(processes)
        raise
    meet(processes)


def unlike(one: dict[str, Any], other: dict[str, Any], first: str, second: str) -> UserError | None:
    """Returns an error if two ranks made different calls, or passed different arguments; None if they agree.

    Args:
        one: the call of one rank: `name`, `line` and `arguments`. Each argument is `{"shown": text}`. Data also has a
            `sample`, a number from -1 to 1 that changes with the values.
        other: the call of the other rank.
        first: name of the first rank, for the message.
        second: name of the second rank.
    """
    if one["name"] != other["name"]:
        words = [
            f"calls {meeting['name']} ({meeting['line']})" if meeting["name"] else "has ended the training function"
            for meeting in (one, other)
        ]
        return UserError(f"the ranks do different things: {first} {words[0]}, {second} {words[1]}: {ALIKE}")
    for name in dict.fromkeys([*one["arguments"], *other["arguments"]]):
        given = [each["arguments"].get(name, {}) for each in (one, other)]
        texts = [each.get("shown", "nothing") for each in given]
        if given[0].get("shown") == given[1].get("shown"):
            if math.isclose(*(each.get("sample") or 0.0 for each in given), rel_tol=0, abs_tol=_TOLERANCE):
                continue
            texts = [f"{texts[0]} with some values", "other values"]
        is_data = "sample" in (given[0] or given[1])
        cure = "each rank selects its rows of the global batch: pass the same data on every rank, and seed random code"
        return UserError(
            f"{one['name']} ({one['line']}): expected the same {name} on all ranks. Received: {texts[0]} on {first}, "
            f"{texts[1]} on {second}; {cure if is_data else 'pass the same value on every rank'}"
        )
    return None
