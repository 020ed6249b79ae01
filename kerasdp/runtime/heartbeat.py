"""Writes down what a rank of a run does, and lets the ranks wait for each other before each call.

Whoever watches over them (`kerasdp.runtime.watch`) so sees ranks that do different things, and those that hang.
"""

import contextlib
import functools
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.errors import addressed
from kerasdp.runtime import lines, outcome, rank, signals
from kerasdp.runtime.link import Link
from kerasdp.runtime.rank import CALL, COMPILING, END, MEETING, OUTSIDE, OVER, STEP, Rank, RankFile, Record

SECONDS_BETWEEN_SIGNS = 0.5
_OF_PROCESSES = ("all_gather_object", "broadcast_from_rank0", "all_reduce_max_delayed", "any_rank")
_OF_STRATEGY = ("gather_variables", "diverged_variables")


class Heartbeat:
    """Marks what this rank does. The attributes are those of `rank.Record`."""

    def __init__(self, tell_after: float | None = None, link: Link | None = None):
        """Begins in the script.

        Args:
            tell_after: seconds without a move after which a line says where this process is. None: never.
            link: with the other ranks, if there are any.
        """
        self._tell_after, self._link = tell_after, link
        self._file = RankFile(outcome.place())
        # See `Notes`; and of the calls that run, the numbers of the meetings before them.
        self._meetings: dict[str, list[str]] = {}
        self._running: list[str] = []
        self._error, self._place = "", ""
        self._calls: list[int] = []
        self._state, self._num_events, self._num_meetings, self._step = OUTSIDE, 0, 0, 0
        self._since = time.monotonic()
        self._known_shapes: set[Any] = set()
        # Of other threads, which read ahead, events would come in any order.
        self._thread = threading.get_ident()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._write_notes()
        self._write()

    def rank(self) -> Rank:
        """Returns where this rank is."""
        with self._lock:
            return self._file.rank(0, "")

    @contextlib.contextmanager
    def call(self, name: str, arguments: dict[str, Any] | None = None) -> Iterator[None]:
        """Marks a call that all ranks make together: it begins when all have come to it, with the same arguments.

        Args:
            name: as users write it.
            arguments: see `rank.differing_argument`.
        """
        line = lines.of_call()
        self._meet(name, line, arguments or {}, MEETING)
        self._calls.append(self._num_meetings)
        self._running.append(f"{name} ({line})" if line else name)
        self._error = ""
        self._write_notes()
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
            self._write_notes()
            self._move(CALL if self._calls else OUTSIDE)

    @contextlib.contextmanager
    def of_run(self) -> Iterator[None]:
        """Marks the training function; at its end waits until all ranks have come there."""
        threading.Thread(target=self._live, daemon=True, name="heartbeat").start()
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
        if self._link is None:
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
            function: gets as its first argument a batch, or a list of them.
            step: returns how many steps are trained.
        """

        def call(data: Any, *args: Any) -> Any:
            shape = id(function), *map(_shapes_of, data if isinstance(data, list) else [data])
            if name == "train":
                self._step = step() + 1
            with self.event(name):
                if shape not in self._known_shapes:
                    self._move(COMPILING)
                result = function(data, *args)
            self._known_shapes.add(shape)
            return result

        return call

    def _leave(self) -> None:
        self._meet("", "", {}, END)
        self._move(OVER)

    def _meet(self, name: str, line: str, arguments: dict[str, Any], state: int) -> None:
        """Waits for all ranks. Raises `UserError` unless they have come before the same call."""
        number = self._num_meetings + 1
        self._meetings = {**dict(list(self._meetings.items())[-1:]), str(number): [name, line]}
        self._write_notes()
        self._begin_event(f"before {name}")
        self._num_meetings = number
        self._move(state)
        if self._link is None:
            return
        meetings = self._link.all_gather_object({"name": name, "line": line, "arguments": arguments}, "call")
        for other, its_name in zip(meetings[1:], self._link.names[1:]):
            if (error := rank.unlike(meetings[0], other, self._link.names[0], its_name)) is not None:
                raise error

    def _begin_event(self, name: str) -> None:
        self._num_events += 1
        self._file.write_event(self._num_events, _code(name))

    def _move(self, state: int) -> None:
        self._state, self._since = state, time.monotonic()
        self._write()

    def _write(self) -> None:
        calls = self._calls or (0,)
        with self._lock:
            self._file.write(
                Record(
                    os.getpid(), self._state, self._num_events, self._num_meetings, calls[-1], calls[0], self._step,
                    signals.is_finishing(), self._since, time.monotonic(),
                )
            )  # fmt: skip

    def _write_notes(self) -> None:
        with self._lock:
            is_of_user = lines.is_of_user(self._place)
            self._file.write_notes(rank.Notes(self._meetings, self._running, self._error, self._place, is_of_user))

    def _live(self) -> None:
        """Gives a sign of life twice a second, and says where this process is as long as it does not move."""
        told = 0.0
        while not self._is_over.wait(SECONDS_BETWEEN_SIGNS):
            self._write()
            since, seconds = self._since, time.monotonic() - self._since
            if seconds <= SECONDS_BETWEEN_SIGNS:
                continue
            if (place := lines.place_of(self._thread)) != self._place:
                self._place = place
                self._write_notes()
            if self._tell_after and seconds > self._tell_after and self._state in (CALL, STEP) and told != since:
                told = since
                words = f"nothing has moved for {seconds:.0f} s in {', '.join(self._running)}"
                cure = f"at {self._place}; --hang_timeout ends such a run"
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
