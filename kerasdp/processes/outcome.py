"""How each process of a run ended: one file a process, written last and at once, for whoever started it.

A process that is killed leaves none.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
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


_place: Place | None = None
_lock = threading.Lock()


def begin(place: Place) -> None:
    """Makes this process a worker, which leaves an outcome. What an earlier one with that place has left is removed."""
    global _place
    _place = place
    with contextlib.suppress(FileNotFoundError):
        os.remove(_path(place))


def place() -> Place | None:
    """Returns where this process leaves its files; None if nobody has started it as a worker."""
    return _place


def note_signal() -> None:
    """Marks that this worker has noted a signal, and so ends."""
    if _place is not None:
        with contextlib.suppress(OSError), open(_mark(_place), "w"):
            pass


def has_noted_signal(place: Place) -> bool:
    """Returns whether a worker has noted a signal."""
    return os.path.exists(_mark(place))


def write_result(result: Any) -> None:
    """Ends a worker with what its function returned."""
    _write(Outcome(time.monotonic(), result=pickle.dumps(result)))


def write_error(error: BaseException) -> None:
    """Ends a worker with an error. The first one counts."""
    known: RunError | SystemExit | None = None
    if isinstance(error, SystemExit):
        known = SystemExit(error.code if isinstance(error.code, int | None) else str(error.code))
    elif (kind := kind_of(error)) is not None:
        known = kind(str(error))
    _write(Outcome(time.monotonic(), known, "".join(traceback.format_exception(error))))


def read(place: Place) -> Outcome | None:
    """Returns how a worker ended; None before that, and if it left nothing."""
    with contextlib.suppress(FileNotFoundError), open(_path(place), "rb") as file:
        return Outcome(*pickle.load(file))
    return None


def leave_with(error: RunError) -> None:
    """Ends this process for another one's error, whatever its main thread does: it may wait in native code."""
    if _place is None:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        write_error(error)
    sys.stdout.flush()
    os._exit(error.exit_code)


def kind_of(error: BaseException) -> type[RunError] | None:
    """Returns the class of an error that each process knows; None: it may be known here alone."""
    return type(error) if isinstance(error, RunError) and type(error).__module__ == RunError.__module__ else None


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
    path, content = _path(_place), pickle.dumps(tuple(outcome))
    with _lock:  # another process's error may end this one while it fails
        if not os.path.exists(path):
            try:
                with open(f"{path}.new", "wb") as file:
                    file.write(content)
            except OSError:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(f"{path}.new")  # makes room to say so
                raise
            os.replace(f"{path}.new", path)


def _path(place: Place) -> str:
    return os.path.join(place.folder, f"outcome-{place.number}")


def _mark(place: Place) -> str:
    return os.path.join(place.folder, f"signal-{place.number}")
