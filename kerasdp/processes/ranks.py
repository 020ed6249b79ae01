"""Finds which of several processes this one is, and lets them, the ranks of a run, begin and end each call alike."""

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

# How many processes somebody else has started, of whom torch knows nothing; in a script of sbatch srun has not, yet.
_OF_TASKS = {"srun": ("SLURM_STEP_ID", "SLURM_NTASKS"), "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}
_PAGE = "docs/many-machines.md"
_PLACES = {
    "torch": f"torch takes its place from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets "
    f"them: {_PAGE}",
    "jax": f"JAX takes its place from SLURM, Kubernetes, Cloud TPU or JAX_COORDINATOR_ADDRESS: {_PAGE}",
    "tensorflow": "Keras 3 has no strategy of TensorFlow for several machines; use --backend=torch or jax",
}
ALIKE = (
    "fit, evaluate and predict are the work of all ranks: call them on every rank, in the same order; only prints and "
    "files belong under `if runner.is_chief:`"
)
# Samples of the same data on two ranks may differ by round-off.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where this process is among those that were started for a run.

    Args:
        source: what says so: `"torchrun"`, `"slurm"`, ...
        num_processes: that were started.
        process: number of this one, from 0.
        local_process: number of this process on its machine.
    """

    source: str
    num_processes: int
    process: int
    local_process: int = 0


def find_ranks(backend: str, environment: Environment = os.environ) -> Cluster | None:
    """Returns which rank of torch this process is, as torchrun and others say in the environment; None: the only one.

    Raises:
        UserError: if several processes were started, and each would train alone.
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
    """Hands out what one process has to all processes of a run.

    Attributes:
        rank: number of this process, from 0.
        num_processes: how many there are.
    """

    rank: int
    num_processes: int

    def __call__(self, values: list[Any], number: int) -> Any:
        """Returns this process's one of the values that rank 0 gives, one for each rank; the others' are not looked at.

        Called by all processes, in any thread; calls with the same number are made in the same order by all. On rank 0
        it returns when the others have theirs.
        """


class Processes(Protocol):
    """Collective operations between the processes of a run: each rank calls the same ones, in the same order.

    Attributes:
        rank: number of this process, from 0.
        num_processes: how many there are.
    """

    rank: int
    num_processes: int

    def all_gather_object(self, value: T) -> list[T]:
        """Returns what each process has, in the order of the ranks."""

    def all_reduce_max_delayed(self, number: int) -> int:
        """Returns the maximum over the ranks of the numbers of the call before this one, so that nobody waits."""

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""

    def open_scatter(self) -> Scatter | None:
        """Returns a scatter whose messages meet no other one's; None where there is only one process."""


def meet(processes: Processes, name: str = "", arguments: dict[str, Any] | None = None) -> None:
    """Waits until all ranks have come to the same call, with the same arguments.

    Args:
        processes: of the run.
        name: of the call, as users write it; empty: the end of the training function.
        arguments: see `unlike`.

    Raises:
        UserError: on all ranks the same, if they have come to different ones.
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
    """Raises the same `UserError` on all processes if they differ in a choice or a version."""
    used = ("python", "kerasdp", "keras", "numpy", config.backend)
    fields = config.as_dict()
    choices = {f"--{each.flag}": fields[name] for name, each in choices_of(Config).items() if not each.of_host}
    given = choices | {package: version for package, version in versions().items() if package in used}
    meet(processes, "launch", {name: {"shown": str(value)} for name, value in given.items()})


@contextlib.contextmanager
def ending_alike(processes: Processes) -> Iterator[None]:
    """Lets the ranks wait for each other at the end of the training function."""
    try:
        yield
    except SystemExit as end:
        if not end.code and signals.noted() is None:  # as at the end of a script
            meet(processes)
        raise
    meet(processes)


def unlike(one: dict[str, Any], other: dict[str, Any], first: str, second: str) -> UserError | None:
    """Returns the error of two ranks, by their names, that came to a meeting before calls that are not alike.

    Args:
        one: `name`, `line` and `arguments` of one rank's call, each of these as `{"shown": text}` with, for data, a
            `sample`: a number from -1 to 1 that other values make another.
        other: of the other's.
        first: name of the rank.
        second: likewise.
    """
    if one["name"] != other["name"]:
        words = [
            f"calls {meeting['name']} ({meeting['line']})" if meeting["name"] else "has left the training function"
            for meeting in (one, other)
        ]
        return UserError(f"the ranks do different things: {first} {words[0]}, {second} {words[1]}: {ALIKE}")
    for name in dict.fromkeys([*one["arguments"], *other["arguments"]]):
        given = [each["arguments"].get(name, {}) for each in (one, other)]
        texts = [each.get("shown", "nothing") for each in given]
        if given[0].get("shown") == given[1].get("shown"):
            if math.isclose(*(each.get("sample") or 0.0 for each in given), rel_tol=0, abs_tol=_TOLERANCE):
                continue
            texts = [f"{texts[0]} with some values", "others"]
        is_data = "sample" in (given[0] or given[1])
        cure = "every rank takes its rows of the global batch by itself, so give each the same, and seed what is random"
        return UserError(
            f"{one['name']} ({one['line']}): expected the same {name} on all ranks. Received: {texts[0]} on {first}, "
            f"{texts[1]} on {second}; {cure if is_data else 'give each the same'}"
        )
    return None
