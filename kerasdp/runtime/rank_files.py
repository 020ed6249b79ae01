"""The files in which each rank of a run writes down where it is, for the other ranks and whoever watches over them."""

import contextlib
import json
import math
import os
import struct
import time
import traceback
from typing import Any, NamedTuple

from kerasdp.errors import UserError

# Where a rank is: in the script; before a call, waiting for the others; in a call; in a step or an exchange, which may
# wait for the others; in what may compile for long; at the end of the training function; over.
OUTSIDE, MEETING, CALL, STEP, COMPILING, END, OVER = range(7)
# So many of a rank's last events are known by their names.
NUM_RECENT = 32
HEAD, CODE = struct.Struct("8q2d"), struct.Struct("H")
NUM_BYTES = HEAD.size + NUM_RECENT * CODE.size
ERROR = ".error"  # at the end of the file with a rank's error
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

    def pack(self) -> bytes:
        """Returns it as bytes."""
        return HEAD.pack(*self[:-1]) + b"".join(map(CODE.pack, self.recent))


class Notes(NamedTuple):
    """What a rank writes down with each call.

    Attributes:
        meetings: the last two, by their number: the call's name and line, and its arguments (see `are_alike`).
        calls: that run, from the outermost, as `fit (train.py:12)`.
        error: with which the last call ended, in a line; empty: with none.
    """

    meetings: dict[str, dict[str, Any]]
    calls: list[str]
    error: str


def record_path(folder: str, rank: int) -> str:
    """Returns the file of a rank's `Record`."""
    return os.path.join(folder, f"rank-{rank}")


def read_record(folder: str, rank: int) -> Record | None:
    """Returns what a rank wrote down last; None before it has begun."""
    with contextlib.suppress(FileNotFoundError), open(record_path(folder, rank), "rb") as file:
        content = file.read()
        if len(content) == NUM_BYTES:
            recent = tuple(code for (code,) in CODE.iter_unpack(content[HEAD.size :]))
            values: list[Any] = [*HEAD.unpack_from(content), recent]
            return Record(*values)
    return None


def write_notes(folder: str, rank: int, notes: Notes) -> None:
    """Writes a rank's notes, at once for whoever reads them."""
    path = f"{record_path(folder, rank)}.notes"
    with open(f"{path}.new", "w") as file:
        json.dump(notes, file)
    os.replace(f"{path}.new", path)


def read_notes(folder: str, rank: int) -> Notes:
    """Returns a rank's notes."""
    with contextlib.suppress(FileNotFoundError), open(f"{record_path(folder, rank)}.notes") as file:
        return Notes(*json.load(file))
    return Notes({}, [], "")


def write_place(folder: str, rank: int, place: str) -> None:
    """Writes the line at which a rank is."""
    with contextlib.suppress(OSError), open(f"{record_path(folder, rank)}.place", "w") as file:
        file.write(place)


def read_place(folder: str, rank: int) -> str:
    """Returns the line at which a rank is that has not moved for some time; may be empty."""
    with contextlib.suppress(OSError), open(f"{record_path(folder, rank)}.place") as file:
        return file.read()
    return ""


def write_error(folder: str, rank: int, error: BaseException, message: Any) -> None:
    """Writes down the error with which a rank ends, and its text."""
    frames = "".join(traceback.format_exception(error))
    record = {"name": type(error).__name__, "message": message, "frames": frames}
    path = os.path.join(folder, f"{time.time_ns()}-{rank}{ERROR}")
    with open(path, "w") as file:
        json.dump(record, file, default=str)


def read_errors(folder: str) -> dict[int, dict[str, Any]]:
    """Returns the errors that ranks have written down, by rank, the first one first."""
    errors = {}
    for name in sorted(name for name in os.listdir(folder) if name.endswith(ERROR)):
        with contextlib.suppress(ValueError), open(os.path.join(folder, name)) as file:  # killed while it wrote
            errors[int(name.removesuffix(ERROR).partition("-")[2])] = json.load(file)
    return errors


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


def forget_errors(folder: str, rank: int) -> None:
    """Removes the errors that a rank has written down."""
    for name in os.listdir(folder):
        if name.endswith(f"-{rank}{ERROR}"):
            os.remove(os.path.join(folder, name))


def unlike(one: dict[str, Any], other: dict[str, Any], first: str, second: str) -> UserError:
    """Returns the error of two ranks, by their names, that came to a meeting before calls that are not alike."""
    if one["name"] != other["name"]:
        words = [
            f"calls {meeting['name']} ({meeting['line']})" if meeting["name"] else "has left the training function"
            for meeting in (one, other)
        ]
        return UserError(f"the ranks do different things: {first} {words[0]}, {second} {words[1]}: {ALIKE}")
    mine, theirs = one["arguments"], other["arguments"]
    name = differing_argument(mine, theirs)
    texts = [arguments.get(name, {}).get("shown", "nothing") for arguments in (mine, theirs)]
    if texts[0] == texts[1]:
        texts = [f"{texts[0]} with some values", "others"]
    is_data = "sample" in (mine.get(name) or theirs.get(name, {}))
    cure = "every rank takes its rows of the global batch by itself, so give each the same, and seed what is random"
    return UserError(
        f"{one['name']} ({one['line']}): expected the same {name} on all ranks. Received: {texts[0]} on {first}, "
        f"{texts[1]} on {second}; {cure if is_data else 'give each the same'}"
    )


def are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two ranks came to a meeting before the same call."""
    return one["name"] == other["name"] and differing_argument(one["arguments"], other["arguments"]) is None
