"""Exchanges values between the processes of a run, its ranks."""

from typing import Protocol, TypeVar

T = TypeVar("T")


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
