"""Joins this process with those of other machines, where each drives all of its devices."""

import atexit
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kerasdp.errors import PreemptedError, RunError, UserError
from kerasdp.runtime import messages
from kerasdp.runtime.cluster import Cluster
from kerasdp.runtime.host_link import HostLink

T = TypeVar("T")

# A collective fails at once if the other end is gone; it is known a moment later which that is.
_SECONDS_TO_KNOW = 3.0

_link: HostLink | None = None
_cluster: Cluster | None = None


class LinkedProcesses:
    """`kerasdp.runtime.ranks.Processes` over a link."""

    local = 0, 1

    def __init__(self, link: HostLink):
        self.link, self.rank, self.num_processes = link, link.rank, link.num_processes
        self._last: Callable[[], list[int]] | None = None
        self._num_scatters = 0

    def all_gather_object(self, value: T) -> list[T]:
        """See `Processes`."""
        return self.link.all_gather_object(value)

    def broadcast_from_rank0(self, values: list[float]) -> list[float]:
        """See `Processes`."""
        return self.all_gather_object(values if self.rank == 0 else [])[0]

    def all_reduce_max_delayed(self, number: int) -> int:
        """See `Processes`."""
        last, self._last = self._last, self.link.gather_later(number)
        return 0 if last is None else max(last())

    def any_rank(self, flag: bool) -> bool:
        """See `Processes`."""
        return any(self.all_gather_object(flag))

    def open_scatter(self) -> "HostScatter":
        """See `Processes`."""
        self._num_scatters += 1
        return HostScatter(self.link, self._num_scatters)


def current_link() -> HostLink | None:
    """Returns the link of this process; None if it has none."""
    return _link


def use_link(link: HostLink, cluster: Cluster) -> None:
    """Makes a link that of this process, until it ends."""
    global _link, _cluster
    _link, _cluster = link, cluster
    atexit.register(link.leave)


def join(cluster: Cluster, interface: str | None) -> HostLink:
    """Links this process with the others, at the coordinator, once in a program.

    Raises:
        UserError: if they do not come, or this program has joined others before.
    """
    if _link is not None:
        if cluster != _cluster:
            raise UserError(f"this program has joined the processes of {_cluster} before. Received: {cluster}")
        return _link
    host, port = cluster.address
    own = messages.own_address((host, port), interface)
    use_link(HostLink.among(cluster.process, cluster.num_processes, host, port, own), cluster)
    return join(cluster, interface)


class HostScatter:
    """`kerasdp.runtime.ranks.Scatter` over a link."""

    def __init__(self, link: HostLink, channel: int):
        self.rank, self.num_processes = link.rank, link.num_processes
        self._link, self._channel = link, channel

    def __call__(self, values: list[Any], number: int, *, wait: bool = True) -> Any:
        """See `kerasdp.runtime.ranks.Scatter`."""
        if self.rank:
            return self._link.next_part(self._channel, number)
        for rank in range(1, self.num_processes):
            self._link.send_part(rank, self._channel, number, values[rank])
        return values[0]

    def finish(self) -> None:
        """See `kerasdp.runtime.ranks.Scatter`: what was sent is on its way, whatever becomes of the arrays."""


@contextlib.contextmanager
def ending_together(cluster: Cluster | None) -> Iterator[None]:
    """Lets the others know if this process fails, and says which of them did if one of them was first.

    `cluster`: of the run; None: it is this process's alone, whatever the program has joined before.
    """
    try:
        yield
    except PreemptedError:
        raise  # with all others
    except BaseException as error:
        if _link is None or cluster is None:
            raise
        if not isinstance(error, RunError) and (reason := _link.reason(_SECONDS_TO_KNOW)) is not None:
            raise reason from error
        _link.fail(error)
        raise
