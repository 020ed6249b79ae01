"""Writes down where a rank of a run is, and lets the ranks wait for each other before each call.

Whoever watches over them (`kerasdp.runtime.watch`) so sees ranks that do different things, and those that hang.
"""

import contextlib
import functools
import math
import mmap
import os
import pickle
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kerasdp.errors import UserError, addressed, shared
from kerasdp.runtime import lines, outcome, signals
from kerasdp.runtime.outcome import Place
from kerasdp.runtime.ranks import Processes

SECONDS_BETWEEN_SIGNS = 0.5
# What compiles for so long is worth a line.
_SECONDS_TO_COMPILE = 5.0
# So many of a rank's last events are known by their names.
NUM_RECENT = 32
ALIKE = (
    "fit, evaluate and predict are the work of all ranks: call them on every rank, in the same order; only prints and "
    "files belong under `if runner.is_chief:`"
)
# Samples of the same data on two ranks may differ by round-off.
_TOLERANCE = 1e-4
NUM_BYTES = 2**15
# Of what is written: checksum and length.
_HEAD = struct.Struct("II")
_OF_PROCESSES = ("all_gather_object", "broadcast_from_rank0", "all_reduce_max_delayed", "any_rank")
_OF_STRATEGY = ("gather_variables", "read", "diverged_variables")


class State:
    """Where a rank is.

    In the script; before a call, waiting for the others; in a call; in a step or an exchange, which may wait for the
    others; in what may compile for long; at the end of the training function; over.
    """

    OUTSIDE, MEETING, CALL, STEP, COMPILING, END, OVER = range(7)


class Rank(NamedTuple):
    """Where a rank is: what it writes down with each change.

    Attributes:
        name: in messages.
        state: see `State`.
        num_events: meetings, steps and exchanges that it has begun, which all ranks begin in the same order.
        recent: names of the last of them.
        num_meetings: of these, meetings: before each call, and at the end of the training function.
        meeting: name and line of the call that the last one was for, as `("fit", "train.py:12")`.
        calls: that run, from the outermost: number of the meeting before it, and as `fit (train.py:12)`.
        step: of the training, from 1, or the one after which it is; 0: none.
        saves: whether it would end after its step, with a checkpoint, at a signal.
        is_finishing: whether it has noted one, and so ends.
        error: with which the last call ended, in a line; empty: with none.
        place: the line where it is, if it has not moved for some time.
        is_of_user: whether that line is the user's, not a package's.
        since: when it came to where it is, in seconds of `time.monotonic`.
        alive: likewise, its last sign of life.
    """

    name: str = ""
    state: int = State.OUTSIDE
    num_events: int = 0
    recent: tuple[str, ...] = ()
    num_meetings: int = 0
    meeting: tuple[str, str] = ("", "")
    calls: tuple[tuple[int, str], ...] = ()
    step: int = 0
    saves: bool = False
    is_finishing: bool = False
    error: str = ""
    place: str = ""
    is_of_user: bool = False
    since: float = 0.0
    alive: float = 0.0

    @property
    def within(self) -> str:
        """Returns the calls that run in words."""
        return " within ".join(call for _, call in reversed(self.calls))

    @property
    def stay(self) -> str:
        """Returns in words where it is."""
        if self.state in (State.END, State.OVER):
            return "at the end of the training function"
        if not self.calls:
            return f"in the script, after {self.error}" if self.error else "in the script"
        if not self.step:
            return f"in {self.within}"
        return f"{'in' if self.state == State.STEP else 'after'} step {self.step} of {self.within}"

    def doing(self) -> str:
        """Returns in words what it does."""
        if self.state in (State.END, State.OVER):
            return "has left the training function"
        if self.state != State.MEETING:
            return f"is {self.stay}"
        return f"calls {_named(*self.meeting)}{f' within {self.within}' if self.calls else ''}"

    @property
    def events(self) -> dict[int, str]:
        """Returns the names of its last events by their numbers."""
        return dict(enumerate(self.recent, self.num_events - len(self.recent) + 1))

    def with_ages(self) -> "Rank":
        """Returns it with ages in place of times, for another machine; of such a one, with times of this machine."""
        now = time.monotonic()
        return self._replace(since=now - self.since, alive=now - self.alive)


def read_rank(place: Place, name: str) -> Rank | None:
    """Returns where a rank is; None before it has begun, or while it writes."""
    try:
        with open(_path(place), "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    if len(content) < NUM_BYTES:
        return None
    checksum, length = _HEAD.unpack_from(content)
    content = content[_HEAD.size :][:length]
    return Rank(*pickle.loads(content))._replace(name=name) if content and zlib.crc32(content) == checksum else None


def _memory(place: Place) -> mmap.mmap:
    """Returns the memory in which a rank writes down where it is: a file, which stays when it has died."""
    with open(_path(place), "w+b") as file:
        file.write(bytes(NUM_BYTES))  # not a hole: filling it would end this process by SIGBUS on a full disk
        file.flush()
        return mmap.mmap(file.fileno(), NUM_BYTES)


def _path(place: Place) -> str:
    return os.path.join(place.folder, f"rank-{place.number}")


def _named(name: str, line: str) -> str:
    return f"{name} ({line})" if line else name


class Heartbeat:
    """Marks what this rank does."""

    def __init__(self, tell_after: float | None = None, processes: Processes | None = None, compiler: str = ""):
        """Begins in the script.

        Args:
            tell_after: seconds without a move after which a line says where this process is. None: never.
            processes: of the run.
            compiler: what compiles here, for a line that says so once; empty: none.
        """
        self._tell_after, self._processes, self._compiler = tell_after, processes, compiler
        place = outcome.place()
        self._memory = None if place is None else _memory(place)  # None: nobody looks
        self._fields: dict[str, Any] = dict(zip(Rank.__annotations__, Rank()))
        self._known_shapes: set[Any] = set()
        # Of other threads, which read ahead, events would come in any order.
        self._thread = threading.get_ident()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._move(State.OUTSIDE)

    @property
    def rank(self) -> Rank:
        """Returns where this rank is."""
        with self._lock:
            return Rank(**self._fields)

    @contextlib.contextmanager
    def call(self, name: str, arguments: dict[str, Any] | None = None) -> Iterator[None]:
        """Marks a call that all ranks make together: it begins when all have come to it, with the same arguments.

        Args:
            name: as users write it.
            arguments: see `unlike`.
        """
        line = lines.of_call()
        self._meet(name, line, arguments or {}, State.MEETING)
        rank = self.rank
        own = rank.num_meetings, _named(name, line)
        self._move(State.CALL, calls=(*rank.calls, own), error="", step=rank.step if rank.calls else 0)
        failed = {}
        try:
            yield
        except BaseException as error:
            failed = {"error": f"{own[1]} by {lines.of_error(error)}"}
            raise
        finally:
            self._move(State.CALL if rank.calls else State.OUTSIDE, calls=rank.calls, **failed)

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
    def event(self, name: str, **changes: Any) -> Iterator[None]:
        """Marks what all ranks do in the same order, and may wait for each other in; `changes`: of the `Rank`."""
        if threading.get_ident() != self._thread:
            yield
            return
        with self._staying(State.STEP, **changes, **self._next_event(name)):
            yield

    def _next_event(self, name: str) -> dict[str, Any]:
        recent = (*self._fields["recent"][1 - NUM_RECENT :], name)
        return {"num_events": self._fields["num_events"] + 1, "recent": recent}

    def mark_exchanges(self, strategy: Any) -> None:
        """Marks whatever a strategy (`kerasdp.backends.base.Strategy`) exchanges between the ranks by a method.

        Lets it mark what it compiles later than in the first step of a shape.
        """
        strategy.compiling = self.compiling
        if strategy.processes.num_processes == 1:
            return
        for owner, names in ((strategy.processes, _OF_PROCESSES), (strategy, _OF_STRATEGY)):
            for name in names:
                setattr(owner, name, _within(functools.partial(self.event, name), getattr(owner, name)))

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Marks what may take long, since it builds, traces or compiles."""
        return self._staying(State.COMPILING)

    def reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that reads data, which may not take as long as what compiles may."""
        return _within(functools.partial(self._staying, State.CALL), function)

    @contextlib.contextmanager
    def _staying(self, state: int, **changes: Any) -> Iterator[None]:
        kept = self._fields["state"]
        self._move(state, **changes)
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
            shape = id(function), *map(shapes_of, data if isinstance(data, list) else [data])
            with self.event(name, **({"step": step() + 1} if name == "train" else {})):
                if shape not in self._known_shapes:
                    self._move(State.COMPILING)
                result = function(data, *args)
            self._known_shapes.add(shape)
            return result

        return call

    def _leave(self) -> None:
        self._meet("", "", {}, State.END)
        self._move(State.OVER)

    def _meet(self, name: str, line: str, arguments: dict[str, Any], state: int) -> None:
        """Waits for all ranks. Raises `UserError` unless they have come before the same call."""
        number = self.rank.num_meetings + 1
        self._move(state, num_meetings=number, meeting=(name, line), **self._next_event(f"before {name}"))
        if self._processes is None or self._processes.num_processes == 1:
            return
        own = {"name": name, "line": line, "arguments": arguments}
        first, *others = self._processes.all_gather_object(own)
        for number, other in enumerate(others, 1):
            if (error := unlike(first, other, "rank 0", f"rank {number}")) is not None:
                raise error

    def _move(self, state: int, **changes: Any) -> None:
        self._write(state=state, since=time.monotonic(), **changes)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            of_signals = {"saves": signals.is_awaited(), "is_finishing": signals.is_finishing()}
            self._fields.update(changes, **of_signals, alive=time.monotonic())
            if self._memory is None:
                return
            content = pickle.dumps((*self._fields.values(),))
            self._memory[: _HEAD.size + len(content)] = _HEAD.pack(zlib.crc32(content), len(content)) + content

    def _live(self) -> None:
        """Gives a sign of life twice a second, and says where this process is as long as it does not move."""
        told = 0.0
        while not self._is_over.wait(SECONDS_BETWEEN_SIGNS):
            rank = self.rank
            if (seconds := time.monotonic() - rank.since) <= SECONDS_BETWEEN_SIGNS:
                self._write()
                continue
            place = lines.place_of(self._thread)
            self._write(place=place, is_of_user=lines.is_of_user(place))
            if self._compiler and rank.state == State.COMPILING and seconds > _SECONDS_TO_COMPILE:
                print(f"{self._compiler} compiles: {seconds:.0f} s so far", file=sys.stderr, flush=True)
                self._compiler = ""
            is_waiting = rank.state in (State.CALL, State.STEP)
            if self._tell_after and seconds > self._tell_after and is_waiting and told != rank.since:
                told = rank.since
                words = f"nothing has moved for {seconds:.0f} s in {', '.join(call for _, call in rank.calls)}"
                cure = f"at {place}; --hang_timeout ends such a run"
                print(addressed(f"{words}, {cure}"), file=sys.stderr, flush=True)


def _within(context: Callable[[], contextlib.AbstractContextManager[None]], function: Callable[..., Any]) -> Any:
    """Returns a function that runs within a context."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with context():
            return function(*args)

    return call


def shapes_of(data: Any) -> Any:
    """Returns the shapes in a structure of tensors."""
    if isinstance(data, dict):
        return tuple(map(shapes_of, data.values()))
    if isinstance(data, (list, tuple)):
        return tuple(map(shapes_of, data))
    return tuple(data.shape) if hasattr(data, "shape") else None


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
        return shared(f"the ranks do different things: {first} {words[0]}, {second} {words[1]}: {ALIKE}")
    for name in dict.fromkeys([*one["arguments"], *other["arguments"]]):
        given = [each["arguments"].get(name, {}) for each in (one, other)]
        texts = [each.get("shown", "nothing") for each in given]
        if given[0].get("shown") == given[1].get("shown"):
            if math.isclose(*(each.get("sample") or 0.0 for each in given), rel_tol=0, abs_tol=_TOLERANCE):
                continue
            texts = [f"{texts[0]} with some values", "others"]
        is_data = "sample" in (given[0] or given[1])
        cure = "every rank takes its rows of the global batch by itself, so give each the same, and seed what is random"
        return shared(
            f"{one['name']} ({one['line']}): expected the same {name} on all ranks. Received: {texts[0]} on {first}, "
            f"{texts[1]} on {second}; {cure if is_data else 'give each the same'}"
        )
    return None
