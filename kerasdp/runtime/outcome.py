"""How each process of a run ended: one file a process, written last and at once, for whoever started it.

A process that is killed leaves none.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

from kerasdp import errors
from kerasdp.errors import RunError, WorkerError


class Place(NamedTuple):
    """Where a worker process leaves its files.

    Attributes:
        folder: of its run, which only this user can enter.
        number: of the process among those of this machine.
        num_workers: how many these are.
    """

    folder: str
    number: int
    num_workers: int


class Outcome(NamedTuple):
    """How a process ended.

    Attributes:
        time: when, in seconds of `time.monotonic`.
        name: the error's class; empty: it returned.
        message: the error's text; of SystemExit its code.
        frames: the error's stack.
        is_echo: whether it ended for another process.
    """

    time: float
    name: str = ""
    message: Any = ""
    frames: str = ""
    is_echo: bool = False

    def as_error(self, words: str) -> BaseException:
        """Returns the error; one that is no `RunError` as the error of a worker, which `words` name."""
        if self.name == SystemExit.__name__:
            return SystemExit(self.message)
        known = errors.from_name(self.name, str(self.message))
        return known or WorkerError(f"{words} failed\n{self.frames}".rstrip())


_place: Place | None = None
_is_watched = False
_lock = threading.Lock()


def begin(place: Place, is_watched: bool = True) -> None:
    """Makes this process a worker, which leaves an outcome.

    Args:
        place: of its files. What an earlier worker with that place has left is removed.
        is_watched: whether the process that has started it sees where it is, and ends it where it hangs.
    """
    global _place, _is_watched
    _place, _is_watched = place, is_watched
    with contextlib.suppress(FileNotFoundError):
        os.remove(_path(place, "outcome"))


def place() -> Place | None:
    """Returns where this process leaves its files; None if nobody has started it as a worker."""
    return _place


def is_watched() -> bool:
    """Returns whether another process on this machine sees what becomes of this one."""
    return _is_watched


def write_result(result: Any) -> None:
    """Ends a worker with what its function returned."""
    assert _place is not None  # noqa: S101
    with open(_path(_place, "result"), "wb") as file:
        pickle.dump(result, file)
    _write(Outcome(time.monotonic()))


def write_error(error: BaseException, is_echo: bool = False) -> None:
    """Ends a worker with an error. The first one counts."""
    message = error.code if isinstance(error, SystemExit) else str(error)
    frames = "".join(traceback.format_exception(error))
    _write(Outcome(time.monotonic(), type(error).__name__, message, frames, is_echo))


def read(place: Place) -> Outcome | None:
    """Returns how a worker ended; None before that, and if it left nothing."""
    try:
        with open(_path(place, "outcome")) as file:
            return Outcome(*json.load(file))
    except FileNotFoundError:
        return None


def read_result(place: Place) -> Any:
    """Returns what a worker's function returned."""
    with open(_path(place, "result"), "rb") as file:
        return pickle.load(file)


def leave_with(error: RunError) -> None:
    """Ends this process for another one's error, whatever its main thread does: it may wait in native code."""
    if _place is None:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        write_error(error, is_echo=True)
    sys.stdout.flush()
    os._exit(error.exit_code)


def line_of(error: BaseException) -> str:
    """Returns an error in a line."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return how_it_ended(128 - error.code)
    text = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0][:500] if text.strip() else type(error).__name__


def how_it_ended(exit_code: int) -> str:
    """Returns an exit code in words."""
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _write(outcome: Outcome) -> None:
    if _place is None:
        return
    path = _path(_place, "outcome")
    with _lock:  # a link may end this process for another one while it fails
        if not os.path.exists(path):
            with open(f"{path}.new", "w") as file:
                json.dump(outcome, file, default=str)
            os.replace(f"{path}.new", path)


def _path(place: Place, name: str) -> str:
    return os.path.join(place.folder, f"{name}-{place.number}")
