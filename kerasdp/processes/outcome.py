"""How each process of a run ended: one file a process, written last and at once, for the process that started it.

A process that is killed leaves none.
"""

import contextlib
import os
import pickle
import signal
import time
import traceback
from typing import Any, NamedTuple

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
        error: a `RunError` or SystemExit that it raised.
        frames: the stack of whatever it raised; empty: it returned.
        result: what its function returned, pickled.
    """

    time: float
    error: RunError | SystemExit | None = None
    frames: str = ""
    result: bytes = b""

    def as_error(self, words: str) -> BaseException:
        """Returns the error; one that is no `RunError` as the error of a worker, which `words` name."""
        return self.error or WorkerError(f"{words} failed\n{self.frames}".rstrip())


# Where this process leaves its files; None if nobody has started it as a worker.
current: Place | None = None


def write_result(result: Any) -> None:
    """Ends a worker with what its function returned."""
    _write(Outcome(time.monotonic(), result=pickle.dumps(result)))


def write_error(error: BaseException) -> None:
    """Ends a worker with an error."""
    known: RunError | SystemExit | None = None
    if isinstance(error, SystemExit):
        known = SystemExit(error.code if isinstance(error.code, int | None) else str(error.code))
    elif isinstance(error, RunError) and type(error).__module__ == RunError.__module__:  # which each process knows
        known = type(error)(str(error))
    _write(Outcome(time.monotonic(), known, "".join(traceback.format_exception(error))))


def read(place: Place) -> Outcome | None:
    """Returns how a worker ended; None before that, and if it left nothing."""
    with contextlib.suppress(FileNotFoundError), open(_path(place), "rb") as file:
        return Outcome(*pickle.load(file))
    return None


def how_it_ended(exit_code: int) -> str:
    """Returns in words how a process ended that left nothing, by its exit code."""
    if exit_code < 0:
        why = ": is the system short of memory?" if exit_code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-exit_code).name}{why}"
    return f"ended with exit code {exit_code}" if exit_code else "ended by itself, without an error"


def _write(outcome: Outcome) -> None:
    assert current is not None  # noqa: S101
    path = _path(current)
    try:
        with open(f"{path}.new", "wb") as file:
            pickle.dump(tuple(outcome), file)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{path}.new")  # makes room to say so
        raise
    os.replace(f"{path}.new", path)


def _path(place: Place) -> str:
    return os.path.join(place.folder, f"outcome-{place.number}")
