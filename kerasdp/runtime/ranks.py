"""Exchanges values between the processes of a run, its ranks, and lets them begin and end each call alike."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from kerasdp.errors import UserError
from kerasdp.runtime import lines, signals

T = TypeVar("T")

ALIKE = (
    "fit, evaluate and predict are the work of all ranks: call them on every rank, in the same order; only prints and "
    "files belong under `if runner.is_chief:`"
)
# Samples of the same data on two ranks may differ by round-off.
_TOLERANCE = 1e-4


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

    def broadcast_from_rank0(self, values: list[float]) -> list[float]:
        """Returns the values of rank 0."""

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
    own = {"name": name, "line": lines.of_call(), "arguments": arguments or {}}
    first, *others = processes.all_gather_object(own)
    for rank, other in enumerate(others, 1):
        if (error := unlike(first, other, "rank 0", f"rank {rank}")) is not None:
            raise error


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
