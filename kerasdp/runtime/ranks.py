"""Exchanges values between the processes of a run, its ranks."""

from typing import Any, Protocol, TypeVar

T = TypeVar("T")


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
