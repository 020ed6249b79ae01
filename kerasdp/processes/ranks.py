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
    "torch": f"torch needs RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the environment; start the "
    f"program with torchrun, which sets these variables ({_PAGE})",
    "jax": f"start the program with SLURM, Kubernetes or on Cloud TPU, or set JAX_COORDINATOR_ADDRESS ({_PAGE})",
    "tensorflow": "Keras 3 cannot train on several machines with TensorFlow; use --backend=torch or jax",
}
ALIKE = (
    "call fit, evaluate and predict on every rank, in the same order; under `if runner.is_chief:` put only code that "
    "prints or writes files"
)
# Samples of the same data on two ranks may differ by round-off.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The rank of this process, and the number of processes of the run.

    Args:
        source: launcher that started the process: `"torchrun"`, `"slurm"`, ...
        num_processes: number of processes of the run.
        process: rank of this process, from 0.
        local_process: rank of this process among the processes on the same machine.
    """

    source: str
    num_processes: int
    process: int
    local_process: int = 0


def find_ranks(backend: str, environment: Environment = os.environ) -> Cluster | None:
    """Returns the torch rank of this process, from environment variables; None if the run has only one process.

    torchrun and other launchers set these variables.

    Raises:
        UserError: if a launcher started several processes, but each process would train alone.
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
        """Returns the value that rank 0 sends to this process.

        All processes must make the call, in any thread. On rank 0 the call returns after all other ranks have received
        their values.

        Args:
            values: on rank 0, one value per rank. Other ranks ignore this argument.
            number: number of the sequence to which the call belongs. All ranks make the calls of a sequence in the same
                order. Different sequences are independent of each other.
        """


class Processes(Protocol):
    """Collective operations between the processes of a run. Each rank must make the same calls in the same order.

    Attributes:
        rank: number of this process, from 0.
        num_processes: number of processes.
    """

    rank: int
    num_processes: int

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the values of all processes, in the order of the ranks."""

    def all_reduce_max_delayed(self, number: int) -> int:
        """Returns the maximum over all ranks of the `number` that each rank passed in the previous call.

        The result is one call late, so that ranks do not wait for each other.
        """

    def any_rank(self, flag: bool) -> bool:
        """Returns whether `flag` is True on at least one rank."""

    def open_scatter(self) -> Scatter | None:
        """Returns a `Scatter` with a separate channel for its messages; None if the run has only one process."""


def meet(processes: Processes, name: str = "", arguments: dict[str, Any] | None = None) -> None:
    """Waits until all ranks have made the same call, with the same arguments.

    Args:
        processes: the processes of the run.
        name: name of the call, such as `fit`. Empty: the end of the training function.
        arguments: descriptions of the arguments of the call, by name. See `unlike`.

    Raises:
        UserError: if the calls or their arguments differ between ranks. All ranks raise the same error.
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
    """Raises a `UserError` on all processes if a flag or a package version differs between two processes."""
    used = ("python", "kerasdp", "keras", "numpy", config.backend)
    fields = config.as_dict()
    choices = {f"--{each.flag}": fields[name] for name, each in choices_of(Config).items() if not each.of_host}
    given = choices | {package: version for package, version in versions().items() if package in used}
    meet(processes, "launch", {name: {"shown": str(value)} for name, value in given.items()})


@contextlib.contextmanager
def ending_alike(processes: Processes) -> Iterator[None]:
    """Waits at the end of the `with` block until all ranks have ended the training function."""
    try:
        yield
    except SystemExit as end:
        if not end.code and signals.noted() is None:  # as at the end of a script
            meet(processes)
        raise
    meet(processes)


def unlike(one: dict[str, Any], other: dict[str, Any], first: str, second: str) -> UserError | None:
    """Returns an error if two ranks made different calls, or passed different arguments; None otherwise.

    Args:
        one: description of the call of the first rank, with the keys `name`, `line` and `arguments`. Each argument is
            described as `{"shown": text}`. For data the key `sample` has a number from -1 to 1 that depends on the
            values.
        other: description of the call of the second rank, with the same keys.
        first: name of the first rank, for the error message.
        second: name of the second rank, for the error message.
    """
    if one["name"] != other["name"]:
        words = [
            f"calls {meeting['name']} ({meeting['line']})" if meeting["name"] else "has ended the training function"
            for meeting in (one, other)
        ]
        return UserError(f"the ranks do different things: {first} {words[0]}, {second} {words[1]}; {ALIKE}")
    for name in dict.fromkeys([*one["arguments"], *other["arguments"]]):
        given = [each["arguments"].get(name, {}) for each in (one, other)]
        texts = [each.get("shown", "nothing") for each in given]
        if given[0].get("shown") == given[1].get("shown"):
            if math.isclose(*(each.get("sample") or 0.0 for each in given), rel_tol=0, abs_tol=_TOLERANCE):
                continue
            texts = [texts[0], "other values in the same shape"]
        is_data = "sample" in (given[0] or given[1])
        cure = "pass the same data on every rank (each rank selects its rows of the batch), and seed random code"
        return UserError(
            f"{one['name']} ({one['line']}): expected the same {name} on all ranks. Received: {texts[0]} on {first}, "
            f"{texts[1]} on {second}; {cure if is_data else 'pass the same value on every rank'}"
        )
    return None
