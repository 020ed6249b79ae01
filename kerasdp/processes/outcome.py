"""Records how each worker process ended, in one file per process, for the process that started it.

The file is written last and atomically. A process that is killed leaves no file.
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
    """The folder where a worker process writes its files, and its number.

    Attributes:
        folder: folder of the run, which only this user can enter.
        number: number of the process among the workers of this machine.
        num_workers: number of workers of this machine.
    """

    folder: str
    number: int
    num_workers: int


class Outcome(NamedTuple):
    """How a process ended.

    Attributes:
        time: time of the end, in seconds of `time.monotonic`.
        error: the `RunError` or SystemExit that the process raised; None for another error, or no error.
        frames: the traceback of any error; empty if the function returned.
        result: the pickled return value.
    """

    time: float
    error: RunError | SystemExit | None = None
    frames: str = ""
    result: bytes = b""

    def as_error(self, words: str) -> BaseException:
        """Returns the recorded error. Any other class becomes a `WorkerError` with `words` and the traceback."""
        return self.error or WorkerError(f"{words} failed\n{self.frames}".rstrip())


# Where this process leaves its files; None if nobody has started it as a worker.
current: Place | None = None


def write_result(result: Any) -> None:
    """Records the return value of a worker's function."""
    _write(Outcome(time.monotonic(), result=pickle.dumps(result)))


def write_error(error: BaseException) -> None:
    """Records the error that ended a worker."""
    known: RunError | SystemExit | None = None
    if isinstance(error, SystemExit):
        known = SystemExit(error.code if isinstance(error.code, int | None) else str(error.code))
    elif isinstance(error, RunError) and type(error).__module__ == RunError.__module__:  # which each process knows
        known = type(error)(str(error))
    _write(Outcome(time.monotonic(), known, "".join(traceback.format_exception(error))))


def read(place: Place) -> Outcome | None:
    """Returns how a worker ended; None if it has not ended yet, or left no file."""
    with contextlib.suppress(FileNotFoundError), open(_path(place), "rb") as file:
        return Outcome(*pickle.load(file))
    return None


def how_it_ended(exit_code: int) -> str:
    """Describes by its exit code how a process ended that left no file."""
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
