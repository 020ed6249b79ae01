"""Records how each worker process ended, so that the process that started the worker can read the result or error.

A worker writes one file, atomically, as its last action. A worker that is killed leaves no file.
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
    """The number of a worker process, and the folder where the process writes its files.

    Attributes:
        folder: temporary folder of the run, which only this user can access.
        number: number of the process among the workers of this machine.
        num_workers: number of workers of this machine.
    """

    folder: str
    number: int
    num_workers: int


class Outcome(NamedTuple):
    """The return value or the error of a worker process that has ended.

    Attributes:
        time: value of `time.monotonic` when the process ended.
        error: the `RunError` or `SystemExit` that the process raised; None if it raised no error, or an error of
            another class.
        frames: traceback of the error, as text; empty if the process raised no error.
        result: the pickled return value; empty if the process raised an error.
    """

    time: float
    error: RunError | SystemExit | None = None
    frames: str = ""
    result: bytes = b""

    def as_error(self, words: str) -> BaseException:
        """Returns `error` if it is set. Otherwise returns a `WorkerError` with the traceback.

        Args:
            words: name of the process, for the message of the `WorkerError`.
        """
        return self.error or WorkerError(f"{words} failed\n{self.frames}".rstrip())


# Where this process leaves its files; None if nobody has started it as a worker.
current: Place | None = None


def write_result(result: Any) -> None:
    """Records the return value of the function that this worker ran."""
    _write(Outcome(time.monotonic(), result=pickle.dumps(result)))


def write_error(error: BaseException) -> None:
    """Records the error that ended this worker."""
    known: RunError | SystemExit | None = None
    if isinstance(error, SystemExit):
        known = SystemExit(error.code if isinstance(error.code, int | None) else str(error.code))
    elif isinstance(error, RunError) and type(error).__module__ == RunError.__module__:  # which each process knows
        known = type(error)(str(error))
    _write(Outcome(time.monotonic(), known, "".join(traceback.format_exception(error))))


def read(place: Place) -> Outcome | None:
    """Reads the `Outcome` of a worker; returns None if the worker still runs, or has left no file."""
    with contextlib.suppress(FileNotFoundError), open(_path(place), "rb") as file:
        return Outcome(*pickle.load(file))
    return None


def how_it_ended(exit_code: int) -> str:
    """Returns a text about a process that left no file, such as "ended with exit code 3"."""
    if exit_code < 0:
        why = "; check whether the system has enough memory" if exit_code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-exit_code).name}{why}"
    return f"ended with exit code {exit_code}" if exit_code else "ended with exit code 0, but without a result"


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
