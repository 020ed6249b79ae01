"""Handles the signals that stop a run: SIGTERM, SIGUSR1 and SIGINT.

Schedulers send SIGTERM or SIGUSR1 some time before they stop a job. A terminal sends SIGINT at Ctrl-C. After the first
signal, a run with checkpoints finishes the current step, saves a checkpoint and ends. A second signal ends the run
immediately. A run without checkpoints ends at the first signal.
"""

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from kerasdp.errors import RunError

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPT = signal.SIGINT
# A signal to a group of processes reaches a worker twice: directly, and from its parent, which passes it on. Ctrl-C too
# arrives from a terminal and from a launcher. Its limit is shorter, since people press it again soon.
SECONDS_OF_ONE, _SECONDS_OF_ONE_INTERRUPT = 2.0, 0.3
# After a second signal the process has so long to end by itself.
_SECONDS_TO_LEAVE = 1.0
_SECONDS_BETWEEN_LOOKS = 0.5
# A signal whose exception was lost is sent again so long after.
_SECONDS_TO_RAISE_AGAIN = 0.05
_noted: list[int] = []
# Those for which a handler has raised what ends the run.
_raised: list[int] = []
# When the handler of each was called last, in seconds of `time.monotonic`.
_handled: dict[int, float] = {}
# What the program is in: `noticed`, `awaited`, `passed_on`, or none of them.
_context = ""


@contextlib.contextmanager
def _within(context: str) -> Iterator[None]:
    global _context
    kept, _context = _context, context
    try:
        yield
    finally:
        _context = kept


@contextlib.contextmanager
def noticed() -> Iterator[None]:
    """Records the signals that arrive within the `with` block.

    The context manager has no effect inside another context manager of this module, or outside the main thread.
    """
    if _context or threading.current_thread() is not threading.main_thread():
        yield
        return
    _noted.clear()
    _raised.clear()
    handlers: dict[signal.Signals, Callable[[int, Any], None]] = dict.fromkeys(_SIGNALS, _note)
    if signal.getsignal(INTERRUPT) is signal.default_int_handler:
        handlers[INTERRUPT] = _note
    try:
        with _within("noticed"), _arrivals(handlers), _handlers(handlers), _raised_again():
            yield
    except Exception as error:
        # A framework's native code may make an error of its own of an exception that went through it, and so does
        # TensorFlow (2.21) of all that a bare `except:` catches (`tf.int32.min`).
        # And Ctrl-C reaches all programs of a terminal: those that load the data may not be there for the next step.
        if _raised or (INTERRUPT in _noted and not isinstance(error, RunError)):
            raise _ending(_raised[-1] if _raised else INTERRUPT) from error
        raise


@contextlib.contextmanager
def passed_on(processes: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Forwards signals to worker processes within the `with` block, while this process waits for the workers.

    Ctrl-C is forwarded as SIGUSR1. Workers ignore SIGINT, because a terminal also sends SIGINT to each worker. After
    the first signal, this process still waits for the workers. A second signal ends the wait.

    Args:
        processes: function that returns the workers that are still running. Each worker has a `pid`.

    Raises:
        KeyboardInterrupt: after Ctrl-C, even if the workers saved a checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _noted.clear()

    def pass_on(number: int, _: Any) -> None:
        if _is_copy(number):
            return
        workers, is_second = list(processes()), bool(_noted)
        _noted.append(number)
        if is_second or not workers:
            raise _ending(number)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGUSR1 if number == INTERRUPT else number)

    handlers = dict.fromkeys(_SIGNALS, pass_on)
    if signal.getsignal(INTERRUPT) in (signal.default_int_handler, _note):
        handlers[INTERRUPT] = pass_on
    try:
        with _within("passed_on"), _handlers(handlers):
            yield
    except (RunError, SystemExit):  # also of a rank that found another one gone
        if INTERRUPT in _noted:
            raise KeyboardInterrupt from None
        raise


def _seconds_of_one(number: int) -> float:
    return _SECONDS_OF_ONE_INTERRUPT if number == INTERRUPT else SECONDS_OF_ONE


def _is_copy(number: int) -> bool:
    """Returns whether a signal is a duplicate of a signal that was recorded a moment ago."""
    last, _handled[number] = _handled.get(number, 0.0), time.monotonic()
    return number in _noted and _handled[number] - last < _seconds_of_one(number)


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """Delays signals that arrive within the `with` block until the end of the block.

    Use it for short actions that must not be interrupted, such as the import of a framework. An exception that passes
    through the native code of an import ends the process with SIGABRT (nanobind in jaxlib 0.10.2).
    """
    arrived: list[int] = []
    try:
        with _handlers(dict.fromkeys((*_SIGNALS, signal.SIGINT), lambda number, _: arrived.append(number))):
            yield
    finally:
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


def awaited() -> contextlib.AbstractContextManager[None]:
    """Marks the `with` block as a `fit` with checkpoints, which calls `noted` after each step.

    Within the block, the handler of the first signal raises no exception. `fit` saves a checkpoint and ends the run.
    """
    return _within("awaited")


def noted() -> signal.Signals | None:
    """Returns the first signal that was recorded; None if no signal has arrived."""
    return signal.Signals(_noted[0]) if _noted else None


def leave_if_asked() -> None:
    """Ends the run if the signal handler has raised an exception, but the run still continues.

    This happens if user code catches the exception.
    """
    if _noted and (_context != "awaited" or INTERRUPT in _noted[1:]):
        raise _ending(_noted[-1])


def _note(number: int, _: Any) -> None:
    if _is_copy(number) and number == INTERRUPT:
        return
    is_again = number in _noted and number != INTERRUPT  # the thread finds out whether that is a copy
    is_awaited = _context == "awaited" and not (number == INTERRUPT and _noted)
    _noted.append(number)
    if not (is_again or is_awaited):
        _raised.append(number)
        raise _ending(number)


def _ending(number: int) -> BaseException:
    """Returns the exception that ends the run after a signal."""
    return KeyboardInterrupt() if number == INTERRUPT else SystemExit(128 + number)


@contextlib.contextmanager
def _handlers(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
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
def _raised_again() -> Iterator[None]:
    """Sends a signal again if Python has discarded the exception that the signal handler raised.

    Python discards exceptions in `__del__`, in callbacks of the garbage collector (jax 0.10.2 has one), and in
    callbacks of weak references. For each discarded exception Python calls `sys.unraisablehook`.
    """
    kept = sys.unraisablehook

    def hook(lost: Any) -> None:  # takes no lock, which the main thread may hold, as `threading` does
        if _noted and lost.exc_type in (KeyboardInterrupt, SystemExit):
            _handled.clear()
            _thread.start_new_thread(_send_again, (_noted.pop(),))
        else:
            kept(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = kept


def _send_again(number: int) -> None:
    time.sleep(_SECONDS_TO_RAISE_AGAIN)
    if _context:
        signal.pthread_kill(threading.main_thread().ident or 0, number)


@contextlib.contextmanager
def _arrivals(numbers: Collection[int]) -> Iterator[None]:
    """Ends this process shortly after a second signal, even if native code prevents Python from calling the handler."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    other = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, numbers), daemon=True, name="signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(other, warn_on_full_buffer=False)
        os.close(writer)  # with which the thread ends


def _watch(reader: int, numbers: Collection[int]) -> None:
    """Reads the signals of this process from a pipe, in a thread, and ends the process after a second signal.

    Args:
        reader: file descriptor of the pipe, to which Python writes the number of each signal.
        numbers: signals that can end the process. Other signals are ignored.
    """
    arrived: dict[int, float] = {}  # when each arrived last
    with open(reader, "rb", buffering=0) as arrivals:
        while True:
            looked = time.monotonic()
            if not select.select([arrivals], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
                continue
            byte, now = arrivals.read(1), time.monotonic()
            if not byte:
                return
            number = byte[0]
            if now - looked > 2 * _SECONDS_BETWEEN_LOOKS:
                now = looked  # native code has kept the interpreter, and it came at any time since
            is_second = bool(arrived) and now - arrived.get(number, 0.0) > _seconds_of_one(number)
            if number in numbers:
                arrived[number] = now
                if is_second and _context != "passed_on":  # whose handler ends the wait
                    _leave(number, now)


def _leave(number: int, arrived: float) -> None:
    """Ends this process after a second signal.

    If the signal is Ctrl-C and Python has called the handler, the process does not end here: the handler has raised an
    exception.
    """
    time.sleep(_SECONDS_TO_LEAVE)
    if number == INTERRUPT and _handled.get(number, 0.0) >= arrived:
        return
    if number not in _noted:
        name = signal.Signals(number).name
        sys.stderr.write(f"error: ended by {name}: the main thread waits in native code and cannot handle the signal\n")
        sys.stderr.flush()
    os._exit(128 + number)


def _forget() -> None:
    """Deletes the recorded signals in a forked process, and disconnects this process from the parent's signal pipe."""
    global _context
    _noted.clear()
    _raised.clear()
    if _context:
        signal.set_wakeup_fd(-1)
    _context = ""


os.register_at_fork(after_in_child=_forget)
