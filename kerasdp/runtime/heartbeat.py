"""Writes down what a rank of a run does, and lets the ranks wait for each other before each call.

Whoever watches over them (`kerasdp.runtime.watch`) so sees ranks that do different things, and those that hang.
"""

import contextlib
import functools
import mmap
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from kerasdp.errors import addressed
from kerasdp.runtime import lines, rank_files, signals
from kerasdp.runtime.host_link import HostLink
from kerasdp.runtime.rank_files import CALL, COMPILING, END, MEETING, OUTSIDE, OVER, STEP, Notes

SECONDS_BETWEEN_SIGNS = 0.5
_OF_PROCESSES = ("all_gather_object", "broadcast_from_rank0", "all_reduce_max_delayed", "any_rank")
_OF_STRATEGY = ("gather_variables", "diverged_variables")


class Heartbeat:
    """Marks what this rank does. The attributes are those of `rank_files.Record`."""

    def __init__(
        self,
        folder: str | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        tell_after: float | None = None,
        link: HostLink | None = None,
    ):
        """Begins in the script.

        Args:
            folder: of all ranks' files; None: there is one rank, and nobody watches over it.
            rank: of this process, among those of this machine that one program watches over.
            num_ranks: of these.
            tell_after: seconds without a move after which a line says where this process is. None: never.
            link: with the ranks of other machines, if there are any.
        """
        self._folder, self._rank, self._num_ranks, self._tell_after = folder, rank, num_ranks, tell_after
        self._link = link
        # See `Notes`; and of the calls that run, the numbers of the meetings before them.
        self._meetings: dict[str, dict[str, Any]] = {}
        self._running: list[str] = []
        self._error = ""
        self._calls: list[int] = []
        self._state, self._num_events, self._num_meetings, self._step = OUTSIDE, 0, 0, 0
        self._since = time.monotonic()
        self._known_shapes: set[Any] = set()
        # Of other threads, which read ahead, events would come in any order.
        self._thread = threading.get_ident()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._memory = mmap.mmap(-1, rank_files.NUM_BYTES)
        if folder is not None:
            self._save_notes()
            with open(rank_files.record_path(folder, rank), "w+b") as file:
                file.truncate(rank_files.NUM_BYTES)
                self._memory = mmap.mmap(file.fileno(), rank_files.NUM_BYTES)
        self._write()
        threading.Thread(target=self._live, daemon=True, name="heartbeat").start()

    @contextlib.contextmanager
    def call(self, name: str, arguments: dict[str, Any] | None = None) -> Iterator[None]:
        """Marks a call that all ranks make together: it begins when all have come to it, with the same arguments.

        Args:
            name: as users write it.
            arguments: see `rank_files.differing_argument`.
        """
        line = lines.of_call()
        self._meet(name, line, arguments or {}, MEETING)
        self._calls.append(self._num_meetings)
        self._running.append(f"{name} ({line})" if line else name)
        self._error = ""
        self._save_notes()
        if len(self._calls) == 1:
            self._step = 0
        self._move(CALL)
        try:
            yield
        except BaseException as error:
            self._error = f"{self._running[-1]} by {lines.of_error(error)}"
            raise
        finally:
            self._calls.pop()
            self._running.pop()
            self._save_notes()
            self._move(CALL if self._calls else OUTSIDE)

    @contextlib.contextmanager
    def of_run(self) -> Iterator[None]:
        """Marks the training function; at its end waits until all ranks have come there."""
        try:
            try:
                yield
            except SystemExit as end:
                if end.code or signals.noted() is not None:
                    raise
                self._leave()  # as at the end of a script
                raise
            self._leave()
        finally:
            self._is_over.set()

    @contextlib.contextmanager
    def event(self, name: str) -> Iterator[None]:
        """Marks what all ranks do in the same order, and may wait for each other in."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._begin_event(name)
        with self._staying(STEP):
            yield

    def _together(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that exchanges something with the other ranks, marked as an event."""

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            with self.event(function.__name__):
                return function(*args)

        return call

    def mark_exchanges(self, strategy: Any) -> None:
        """Marks whatever a strategy (`kerasdp.backends.base.Strategy`) exchanges between the ranks by a method."""
        if self._num_ranks == 1:
            return
        for owner, names in ((strategy.processes, _OF_PROCESSES), (strategy, _OF_STRATEGY)):
            for name in names:
                setattr(owner, name, self._together(getattr(owner, name)))

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Marks what may take long, since it builds, traces or compiles."""
        with self._staying(COMPILING):
            yield

    def reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that reads data, which may not take as long as what compiles may."""

        @functools.wraps(function)
        def read(*args: Any) -> Any:
            with self._staying(CALL):
                return function(*args)

        return read

    @contextlib.contextmanager
    def _staying(self, state: int) -> Iterator[None]:
        kept = self._state
        self._move(state)
        try:
            yield
        finally:
            self._move(kept)

    def step_function(self, name: str, function: Callable[..., Any], step: Callable[[], int]) -> Callable[..., Any]:
        """Returns a step function of a model whose calls are marked; the first one with each shape may compile.

        Args:
            name: `train`, `test` or `predict`.
            function: gets as its last argument batches, or an iterator over them.
            step: returns how many steps are trained.
        """

        def call(*args: Any) -> Any:
            *rest, data = args
            new = []

            def look_at(batch: Any) -> Any:
                if (shape := (id(function), _shapes_of(batch))) not in self._known_shapes:
                    new.append(shape)
                    self._move(COMPILING)
                return batch

            if name == "train":
                self._step = step() + 1
            with self.event(name):
                data = map(look_at, data) if hasattr(data, "__next__") else [look_at(batch) for batch in data]
                result = function(*rest, data)
                if name == "train":
                    self._step = step()
            self._known_shapes.update(new)
            return result

        return call

    def _leave(self) -> None:
        self._meet("", "", {}, END)
        self._move(OVER)

    def _meet(self, name: str, line: str, arguments: dict[str, Any], state: int) -> None:
        number, mine = self._num_meetings + 1, {"name": name, "line": line, "arguments": arguments}
        self._meetings[str(number)] = mine
        self._meetings.pop(str(number - 2), None)  # another rank may still read the last one
        self._save_notes()
        self._begin_event(f"before {name}")
        self._num_meetings = number
        self._move(state)
        pause, others = 0.0005, [rank for rank in range(self._num_ranks) if rank != self._rank]
        # With other arguments it stays here until the run is ended by whoever watches over it, and sees the same.
        while others := [rank for rank in others if not self._has_come(rank, number, mine)]:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if self._link is not None:
            self._compare(self._link.all_gather_object(mine), self._link.names)

    def _compare(self, meetings: list[dict[str, Any]], names: list[str]) -> None:
        """Raises `UserError` unless the ranks of all machines have come before the same call."""
        for other, name in zip(meetings[1:], names[1:]):
            if not rank_files.are_alike(meetings[0], other):
                raise rank_files.unlike(meetings[0], other, names[0], name)

    def _has_come(self, rank: int, number: int, mine: dict[str, Any]) -> bool:
        folder = cast(str, self._folder)  # of several ranks
        record = rank_files.read_record(folder, rank)
        if record is None or record.num_meetings < number:
            return False
        theirs = rank_files.read_notes(folder, rank).meetings.get(str(number))
        return theirs is not None and rank_files.are_alike(mine, theirs)

    def _begin_event(self, name: str) -> None:
        self._num_events += 1
        place = rank_files.HEAD.size + self._num_events % rank_files.NUM_RECENT * rank_files.CODE.size
        rank_files.CODE.pack_into(self._memory, place, _code(name))

    def _move(self, state: int) -> None:
        self._state, self._since = state, time.monotonic()
        self._write()

    def _write(self, is_finishing: bool = False) -> None:
        calls = self._calls or (0,)
        with self._lock:
            rank_files.HEAD.pack_into(
                self._memory, 0, os.getpid(), self._state, self._num_events, self._num_meetings, calls[-1], calls[0],
                self._step, is_finishing, self._since, time.monotonic(),
            )  # fmt: skip

    def _save_notes(self) -> None:
        if self._folder is not None:
            rank_files.write_notes(self._folder, self._rank, Notes(self._meetings, self._running, self._error))

    def _live(self) -> None:
        """Gives a sign of life twice a second, and says where this process is as long as it does not move."""
        told = 0.0
        while not self._is_over.wait(SECONDS_BETWEEN_SIGNS):
            self._write(signals.is_finishing())
            since, seconds = self._since, time.monotonic() - self._since
            if self._folder is not None and seconds > SECONDS_BETWEEN_SIGNS:
                rank_files.write_place(self._folder, self._rank, lines.place_of(self._thread))
            if self._tell_after and seconds > self._tell_after and self._state in (CALL, STEP) and told != since:
                told = since
                words = f"nothing has moved for {seconds:.0f} s in {', '.join(self._running)}"
                cure = f"at {lines.place_of(self._thread)}; --hang_timeout ends such a run"
                print(addressed(f"{words}, {cure}"), file=sys.stderr, flush=True)


@functools.cache
def _code(name: str) -> int:
    return zlib.crc32(name.encode()) & 0xFFFF


def _shapes_of(data: Any) -> Any:
    """Returns the shapes in a structure of tensors."""
    if isinstance(data, dict):
        return tuple(map(_shapes_of, data.values()))
    if isinstance(data, (list, tuple)):
        return tuple(map(_shapes_of, data))
    return tuple(data.shape) if hasattr(data, "shape") else None
