"""Joins this process with the others of its run, and exchanges values with them."""

import atexit
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from kerasdp.config import Config
from kerasdp.config.validation import versions
from kerasdp.errors import FIELDS_OF_FLAGS, PreemptedError, RunError, UserError, WorkerError, shared
from kerasdp.runtime import addresses
from kerasdp.runtime.cluster import MEETING_PLACE, Cluster
from kerasdp.runtime.door import private_folder
from kerasdp.runtime.link import Link

T = TypeVar("T")

# A collective fails at once if the other end is gone; it is known a moment later which that is.
_SECONDS_TO_KNOW = 3.0
# What each host has of its own; of `workdir` that of process 0 counts.
_OF_A_HOST = (
    "host_rank", "coordinator", "interface", "data_dir", "workdir", "checkpoint_dir", "verbose", "tracker",
    "resume",  # if one does, all do
)  # fmt: skip


class LinkedProcesses:
    """`kerasdp.runtime.ranks.Processes` over a link, for one run."""

    def __init__(self, link: Link, local: tuple[int, int] = (0, 1)):
        self.link, self.rank, self.num_processes, self.local = link, link.rank, link.num_processes, local
        self._last: Callable[[], list[int]] | None = None
        self._num_scatters = 0

    def all_gather_object(self, value: T) -> list[T]:
        """See `Processes`."""
        return self.link.all_gather_object(value)

    def broadcast_from_rank0(self, values: list[float]) -> list[float]:
        """See `Processes`."""
        return self.link.all_gather_object(values if self.rank == 0 else [], "broadcast_from_rank0")[0]

    def all_reduce_max_delayed(self, number: int) -> int:
        """See `Processes`."""
        last, self._last = self._last, self.link.gather_later(number, "all_reduce_max_delayed")
        return 0 if last is None else max(last())

    def any_rank(self, flag: bool) -> bool:
        """See `Processes`."""
        return any(self.link.all_gather_object(flag, "any_rank"))

    def open_scatter(self) -> "LinkedScatter":
        """See `Processes`."""
        self._num_scatters += 1
        return LinkedScatter(self.link, self._num_scatters)


class LinkedScatter:
    """`kerasdp.runtime.ranks.Scatter` over a link."""

    def __init__(self, link: Link, channel: int):
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


_link: Link | None = None
_cluster: Cluster | None = None


def current_link() -> Link | None:
    """Returns the link of this process; None if it has none."""
    return _link


def join(cluster: Cluster, config: Config) -> Link:
    """Links this process with the others of its run, once in a program; all have made the same choices.

    Raises:
        UserError: if they do not come, or differ; if this program has joined others before.
    """
    global _link, _cluster
    if _link is None:
        _link, _cluster = _joined(cluster, config.interface), cluster
        atexit.register(_link.leave)
    elif cluster != _cluster:
        raise UserError(f"this program has joined the processes of {_cluster} before. Received: {cluster}")
    elif _link.is_failing:
        raise _link.error or WorkerError("this program has left the other processes: start all of them again")
    _require_same(_link, config)
    return _link


def _joined(cluster: Cluster, interface: str | None) -> Link:
    if not cluster.is_local:
        own = addresses.own_address(cluster.address, interface)
        return Link.among(cluster.process, cluster.num_processes, cluster.address, own)
    meeting = hashlib.sha256(f"{cluster.source} {cluster.coordinator}".encode()).hexdigest()[:16]
    # Programs that this one starts are none of these processes.
    place = os.environ.pop(MEETING_PLACE, "") or os.path.join(private_folder(), meeting)
    return Link.among(cluster.process, cluster.num_processes, place)


def _require_same(link: Link, config: Config) -> None:
    """Raises the same `UserError` on all processes if they differ in a choice or a version."""
    used = ("python", "kerasdp", "keras", "numpy", config.backend)
    packages = {name: version for name, version in versions().items() if name in used}
    choices = {_flag(name): value for name, value in config.as_dict().items() if name not in _OF_A_HOST}
    given = link.all_gather_object(choices | packages, "choices")
    for other, name in zip(given[1:], link.names[1:]):
        for what in given[0] | other:
            one, two = given[0].get(what), other.get(what)
            if one != two:
                where = "processes" if link.own is None else "hosts"
                raise shared(
                    f"{what}: expected the same on all {where}. Received: {one} on {link.names[0]}, {two} on {name}; "
                    "give each the same"
                )


def _flag(name: str) -> str:
    known = {field: flag for flag, field in FIELDS_OF_FLAGS.items()}
    return f"--{known.get(name, name)}"


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
        if isinstance(error, SystemExit) and not error.code:
            raise  # as at the end of a script, where all have come
        if _link is None or cluster is None or getattr(error, "is_shared", False):
            raise  # such an error ends each process by itself, in order
        if not isinstance(error, RunError) and (reason := _link.reason(_SECONDS_TO_KNOW)) is not None:
            raise reason from error
        _link.fail(error)
        raise
