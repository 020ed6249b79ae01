"""Handles the signals that ask a run to end.

Schedulers send SIGTERM or SIGUSR1 some time before they take a machine away. If the run keeps checkpoints, the
first one is noted, and the run ends after its step, with a checkpoint; a second one ends it at once. Without
checkpoints the first one does.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A signal to a group of processes reaches a worker twice: by itself, and from its parent, which passes it on.
SECONDS_OF_ONE = 2.0
_noted: list[int] = []
# When they were passed on, in seconds of `time.monotonic`.
_passed_on: list[float] = []
_last = 0.0
_is_awaited = False


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Notes the signals that come within the context. Has no effect outside of the main thread."""
    _noted.clear()
    handlers: dict[signal.Signals, Callable[[int, Any], None]] = dict.fromkeys(_SIGNALS, _note)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = _interrupt
    with _handlers(handlers):
        yield


@contextlib.contextmanager
def passed_on(processes: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Passes the signals on to worker processes (which have a `pid`) within the context, and keeps waiting."""
    _noted.clear()
    _passed_on.clear()

    def pass_on(number: int, _: Any) -> None:
        _noted.append(number)
        _passed_on.append(time.monotonic())
        workers = list(processes())
        if not workers:  # not yet
            raise SystemExit(128 + number)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)

    with _handlers(dict.fromkeys(_SIGNALS, pass_on)):
        yield


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """Marks a `fit` with checkpoints, which queries `noted` after each step."""
    global _is_awaited
    _is_awaited = True
    try:
        yield
    finally:
        _is_awaited = False


def noted() -> signal.Signals | None:
    """Returns the signal that came, if one did.

    Raises:
        KeyboardInterrupt: if it was Ctrl-C, which no step and no checkpoint waits for; see `leave_if_asked`.
    """
    if signal.SIGINT in _noted:
        _raise(signal.SIGINT)
    return signal.Signals(_noted[0]) if _noted else None


def is_finishing() -> bool:
    """Returns whether a signal has been noted, and the run ends after its step, with a checkpoint."""
    return bool(_noted) and _is_awaited


def seconds_since_passed_on() -> list[tuple[int, float]]:
    """Returns the signals that were passed on, with the seconds since."""
    now = time.monotonic()
    return [(number, now - then) for number, then in zip(_noted, _passed_on)]


def leave_as(exit_code: int) -> None:
    """Ends this process, too, if another ended with this code because of a signal that was passed on to it."""
    for number in _noted:
        if exit_code in (-number, 128 + number):
            raise SystemExit(128 + number) from None


def leave_if_asked() -> None:
    """Ends the run if a signal should have done so already.

    An exception that a signal raises while a framework's native code runs a Python callback (jax 0.10.2 does, at each
    garbage collection) is printed, and lost.
    """
    if _noted and (not _is_awaited or signal.SIGINT in _noted):
        _raise(_noted[-1])


def _note(number: int, _: Any) -> None:
    global _last
    is_the_same = number in _noted and time.monotonic() - _last < SECONDS_OF_ONE
    _last = time.monotonic()
    if is_the_same:
        return
    _noted.append(number)
    if len(_noted) > 1 and _is_awaited:
        os._exit(128 + number)
    if not _is_awaited:
        _raise(number)


def _interrupt(number: int, _: Any) -> None:
    _noted.append(number)
    _raise(number)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _handlers(handlers: dict[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
