"""Handles the signals that ask a run to end.

Schedulers send SIGTERM or SIGUSR1 some time before they take a machine away. If the run keeps checkpoints, the
first one is noted, and the run ends after its step, with a checkpoint; a second one ends it at once. Without
checkpoints the first one does.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A signal to a group of processes reaches a worker twice: by itself, and from its parent, which passes it on.
SECONDS_OF_ONE = 2.0
# A process that nobody watches, and that has not noted a signal by then, waits in native code: not for a first step to
# be compiled, which it would save after, but for a collective that never ends, say.
SECONDS_TO_NOTE = 600.0
# And one that has not left by then after a second signal, which ends it at once.
_SECONDS_TO_LEAVE = 1.0
_noted: list[int] = []
# When they were passed on, in seconds of `time.monotonic`.
_passed_on: list[float] = []
_last = 0.0
_is_awaited = False


@contextlib.contextmanager
def noticed(is_watched: bool = False) -> Iterator[None]:
    """Notes the signals that come within the context. Has no effect outside of the main thread.

    `is_watched`: whether another process kills this one if it does not note them.
    """
    _noted.clear()
    handlers: dict[signal.Signals, Callable[[int, Any], None]] = dict.fromkeys(_SIGNALS, _note)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = _interrupt
    with _handlers(handlers), contextlib.nullcontext() if is_watched else _watched():
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


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Ends this process if it stays in native code, where no handler is called, long after a signal, or a second one.

    The interpreter writes the number of each signal into a pipe at once, wherever the main thread is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    kept = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if kept != -1:  # of an event loop, as in a notebook
        signal.set_wakeup_fd(kept)
    _watching.append(writer)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="signals").start()
    try:
        yield
    finally:
        if kept == -1:
            signal.set_wakeup_fd(-1)
        _watching.remove(writer)
        os.close(writer)  # with which the thread ends


def _watch(reader: int) -> None:
    first, again = (0, 0.0), (0, 0.0)  # the signal that came first, and one that came later, with their times
    with open(reader, "rb", buffering=0) as arrivals:
        while True:
            now = time.monotonic()
            left = [
                since + seconds - now
                for number, since, seconds, is_noted in (
                    (*first, SECONDS_TO_NOTE, bool(_noted)),
                    (*again, _SECONDS_TO_LEAVE, _last > again[1] - SECONDS_OF_ONE),
                )
                if number and not is_noted
            ]
            if any(seconds <= 0 for seconds in left):
                _leave((again if again[0] else first)[0])
            if not select.select([arrivals], [], [], min(left, default=None))[0]:
                continue
            numbers, now = arrivals.read(1), time.monotonic()
            if not numbers:
                return
            if numbers[0] in _SIGNALS and not first[0]:
                first = numbers[0], now
            elif numbers[0] in _SIGNALS and (numbers[0] != first[0] or now - first[1] > SECONDS_OF_ONE):
                again = again if again[0] else (numbers[0], now)


def _leave(number: int) -> None:
    name = signal.Signals(number).name
    sys.stderr.write(f"error: ended by {name}, which the main thread did not note: it waits in native code\n")
    sys.stderr.flush()
    os._exit(128 + number)


def _forget() -> None:
    """Keeps the signals of a forked process from its parent's pipe."""
    if _watching:
        signal.set_wakeup_fd(-1)


_watching: list[int] = []
os.register_at_fork(after_in_child=_forget)
