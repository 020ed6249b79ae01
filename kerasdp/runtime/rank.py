"""Where a rank of a run is: what it writes down with each change, for whoever watches over it."""

import json
import math
import mmap
import os
import struct
import time
from typing import Any, NamedTuple

from kerasdp.errors import UserError, shared
from kerasdp.runtime.outcome import Place

# Where a rank is: in the script; before a call, waiting for the others; in a call; in a step or an exchange, which may
# wait for the others; in what may compile for long; at the end of the training function; over.
OUTSIDE, MEETING, CALL, STEP, COMPILING, END, OVER = range(7)
# So many of a rank's last events are known by their names.
NUM_RECENT = 32
HEAD, CODE, _LENGTH = struct.Struct("8q2d"), struct.Struct("H"), struct.Struct("I")
_TEXT = HEAD.size + NUM_RECENT * CODE.size
NUM_BYTES = 2**15
ALIKE = (
    "fit, evaluate and predict are the work of all ranks: call them on every rank, in the same order; only prints and "
    "files belong under `if runner.is_chief:`"
)
# Samples of the same data on two ranks may differ by round-off.
_TOLERANCE = 1e-4


class Record(NamedTuple):
    """What a rank writes down with each change.

    Attributes:
        process: its id.
        state: one of this module's.
        num_events: meetings, steps and exchanges that it has begun, which all ranks begin in the same order.
        num_meetings: of these, meetings: before each call, and at the end of the training function.
        call: number of the meeting before the innermost call that runs; 0: none runs.
        outer_call: likewise, before the outermost.
        step: of the training, from 1, or the one after which it is; 0: none.
        is_finishing: whether it has noted a signal, and ends after its step.
        since: when it came to where it is, in seconds of `time.monotonic`.
        alive: likewise, its last sign of life.
        recent: numbers of the last events' names, by the event's number modulo `NUM_RECENT`.
    """

    process: int
    state: int
    num_events: int
    num_meetings: int
    call: int
    outer_call: int
    step: int
    is_finishing: int
    since: float
    alive: float
    recent: tuple[int, ...] = (0,) * NUM_RECENT


class Notes(NamedTuple):
    """What a rank writes down with each call, and when it has not moved for some time.

    Attributes:
        meetings: the last two, by their number: name and line of the call, as `["fit", "train.py:12"]`.
        calls: that run, from the outermost, as `fit (train.py:12)`.
        error: with which the last call ended, in a line; empty: with none.
        place: the line where it is, if it has not moved for some time.
        is_of_user: whether that line is the user's, not a package's.
    """

    meetings: dict[str, list[str]] = {}
    calls: list[str] = []
    error: str = ""
    place: str = ""
    is_of_user: bool = False


class Rank(NamedTuple):
    """What is known of a rank.

    Attributes:
        number: from 0.
        name: in messages.
        record: what it wrote down with its last change.
        notes: with its last call.
    """

    number: int
    name: str
    record: Record
    notes: Notes

    @property
    def meeting(self) -> list[str]:
        """Returns what it came to its last meeting for."""
        return self.notes.meetings.get(str(self.record.num_meetings), ["", ""])

    @property
    def stay(self) -> str:
        """Returns in words where it is."""
        record, calls = self.record, " within ".join(reversed(self.notes.calls))
        if record.state in (END, OVER):
            return "at the end of the training function"
        if not calls:
            return f"in the script, after {self.notes.error}" if self.notes.error else "in the script"
        if not record.step:
            return f"in {calls}"
        return f"{'in' if record.state == STEP else 'after'} step {record.step} of {calls}"

    def doing(self) -> str:
        """Returns in words what it does."""
        if self.record.state in (END, OVER):
            return "has left the training function"
        if self.record.state != MEETING:
            return f"is {self.stay}"
        (name, line), within = self.meeting, " within ".join(reversed(self.notes.calls))
        call = f"calls {name}" + (f" ({line})" if line else "")
        return f"{call} within {within}" if within else call

    def packed(self) -> list[Any]:
        """Returns it as JSON can hold it, for another machine: with ages in place of times."""
        now = time.monotonic()
        record = self.record._replace(since=now - self.record.since, alive=now - self.record.alive)
        return [record, self.notes]

    @classmethod
    def unpacked(cls, number: int, name: str, values: list[Any]) -> "Rank":
        """Returns what `packed` returned on another machine."""
        now, record = time.monotonic(), Record(*values[0])
        record = record._replace(since=now - record.since, alive=now - record.alive, recent=tuple(record.recent))
        return cls(number, name, record, Notes(*values[1]))


class RankFile:
    """The file in which a rank writes down where it is; it stays when the rank has died."""

    def __init__(self, place: Place | None):
        """`place`: of the rank; None: nobody looks."""
        self.record, self.notes = Record(*(0,) * 8, 0.0, 0.0), Notes()
        self._memory = mmap.mmap(-1, NUM_BYTES)
        if place is not None:
            with open(_path(place), "w+b") as file:
                file.write(bytes(NUM_BYTES))  # not a hole: filling it would end this process by SIGBUS on a full disk
                file.flush()
                self._memory = mmap.mmap(file.fileno(), NUM_BYTES)

    def write(self, record: Record) -> None:
        """Writes what changes with each step; `recent` is written by `write_event`."""
        self.record = record
        HEAD.pack_into(self._memory, 0, *record[:-1])

    def write_event(self, number: int, code: int) -> None:
        """Writes the name of an event."""
        CODE.pack_into(self._memory, HEAD.size + number % NUM_RECENT * CODE.size, code)

    def write_notes(self, notes: Notes) -> None:
        """Writes what changes with each call."""
        self.notes = notes
        text = json.dumps(notes).encode()[: NUM_BYTES - _TEXT - _LENGTH.size]
        self._memory[_TEXT : _TEXT + _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text

    def rank(self, number: int, name: str) -> Rank:
        """Returns what is written there."""
        return Rank(number, name, self.record._replace(recent=_recent(self._memory)), self.notes)


def read_rank(place: Place) -> Rank | None:
    """Returns where a rank is; None before it has begun, or while it writes."""
    try:
        with open(_path(place), "rb") as file:
            content = file.read()
        (length,) = _LENGTH.unpack_from(content, _TEXT)
        notes = Notes(*json.loads(content[_TEXT + _LENGTH.size :][:length]))
    except (FileNotFoundError, ValueError, struct.error):
        return None
    values: list[Any] = [*HEAD.unpack_from(content), _recent(content)]
    record = Record(*values)
    return Rank(place.number, f"rank {place.number}", record, notes) if record.process else None


def _recent(content: Any) -> tuple[int, ...]:
    return tuple(code for (code,) in CODE.iter_unpack(content[HEAD.size : _TEXT]))


def _path(place: Place) -> str:
    return os.path.join(place.folder, f"rank-{place.number}")


def differing_argument(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Returns the name of the first argument of two calls that differs.

    Args:
        one: the arguments of one rank's call, each as `{"shown": text}` with, for data, a `sample`: a number from -1 to
            1 that other values make another.
        other: of another rank's.
    """
    for name in dict.fromkeys([*one, *other]):
        mine, theirs = one.get(name, {}), other.get(name, {})
        samples = [arguments.get("sample") or 0.0 for arguments in (mine, theirs)]
        is_close = math.isclose(*samples, rel_tol=0, abs_tol=_TOLERANCE)
        if mine.get("shown") != theirs.get("shown") or not is_close:
            return name
    return None


def unlike(one: dict[str, Any], other: dict[str, Any], first: str, second: str) -> UserError | None:
    """Returns the error of two ranks, by their names, that came to a meeting before calls that are not alike.

    Args:
        one: `name`, `line` and `arguments` of one rank's call; see `differing_argument`.
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
    mine, theirs = one["arguments"], other["arguments"]
    if (name := differing_argument(mine, theirs)) is None:
        return None
    texts = [arguments.get(name, {}).get("shown", "nothing") for arguments in (mine, theirs)]
    if texts[0] == texts[1]:
        texts = [f"{texts[0]} with some values", "others"]
    is_data = "sample" in (mine.get(name) or theirs.get(name, {}))
    cure = "every rank takes its rows of the global batch by itself, so give each the same, and seed what is random"
    return shared(
        f"{one['name']} ({one['line']}): expected the same {name} on all ranks. Received: {texts[0]} on {first}, "
        f"{texts[1]} on {second}; {cure if is_data else 'give each the same'}"
    )
