"""Detects a run that makes no progress, and reports which line of code each of its processes executes.

A process that waits in native code may block Python's interpreter. So `faulthandler`, which is written in C, writes the
stack of the process.
"""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kerasdp.processes import error_text, outcome
from kerasdp.processes.outcome import Place

# At this signal a worker writes where it stands.
SIGNAL = signal.SIGUSR2
# What builds and compiles may take so long, or `hang_timeout` if that is longer.
SECONDS_TO_COMPILE = 3600.0
# What compiles for so long is worth a line.
_SECONDS_TO_SAY_SO = 5.0
# A timer is set at most so often: each time takes a tenth of a millisecond.
_SECONDS_BETWEEN_TIMERS, _PART_OF_TIMEOUT = 1.0, 0.1
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_file: Any = None


class Watchdog:
    """Writes the stack of this process if the process makes no progress for a given time.

    Attributes:
        seconds_to_compile: estimated time of a compilation, in seconds; None if unknown.
    """

    def __init__(self, timeout: float | None = None, compiler: str = ""):
        """Creates a watchdog whose timer does not run yet. User code may run for any time before the first `fit`.

        Args:
            timeout: seconds without progress after which the process writes its stack. None: no timer ever runs.
            compiler: name of the compiler, for the message about a long compilation. Empty: no message is printed.
        """
        self._timeout, self._compiler = timeout, compiler
        self.seconds_to_compile: float | None = None
        self._limit: float | None = None
        self._set_at = 0.0
        self._known_shapes: set[Any] = set()
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def watching(self, seconds: float | None = None) -> Iterator[None]:
        """Runs the timer during the `with` block, and then restores the previous state of the timer.

        Args:
            seconds: time limit of the block. None: the timeout of the watchdog.
        """
        if self._timeout is None or threading.get_ident() != self._thread:
            yield
            return
        kept = self._limit
        self._set_timer(seconds or self._timeout)
        try:
            yield
        finally:
            self._set_timer(kept)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Allows at least one hour for the code in the `with` block, which may build, trace or compile a model.

        If the watchdog has the name of a compiler, the watchdog prints a message after five seconds.
        """
        telling = threading.Timer(_SECONDS_TO_SAY_SO, self._say_that_it_compiles)
        telling.daemon = True
        if self._compiler:
            telling.start()
        try:
            with self.watching(max(self._timeout or 0, SECONDS_TO_COMPILE)):
                yield
        finally:
            telling.cancel()

    def step_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a model's step function so that the watchdog limits the time of each call.

        The first call with new input shapes may compile, so it gets the longer time limit of `compiling`.

        Args:
            function: step function. Its first argument is a batch or a list of batches.
        """

        def call(data: Any, *args: Any) -> Any:
            shape = id(function), *map(shapes_of, data if isinstance(data, list) else [data])
            with self.watching() if shape in self._known_shapes else self.compiling():
                result = function(data, *args)
            self._known_shapes.add(shape)
            return result

        return call

    def _set_timer(self, limit: float | None) -> None:
        now, most = time.monotonic(), min(_SECONDS_BETWEEN_TIMERS, _PART_OF_TIMEOUT * (self._timeout or 0))
        if limit == self._limit and now - self._set_at < most:
            return
        self._limit, self._set_at = limit, now
        if limit is None:
            faulthandler.cancel_dump_traceback_later()
        else:  # not before the timeout, though the last moves set no timer; who has no parent that reads it ends
            file: Any = _file or sys.__stderr__
            faulthandler.dump_traceback_later(limit + most, file=file, exit=outcome.current is None)

    def _say_that_it_compiles(self) -> None:
        of_all = f" of about {self.seconds_to_compile:.0f} s" if self.seconds_to_compile else ""
        print(f"{self._compiler} compiles: {_SECONDS_TO_SAY_SO:.0f} s{of_all} so far", file=sys.stderr, flush=True)
        self._compiler = ""


# Of the run of this process.
current = Watchdog()


def shapes_of(data: Any) -> Any:
    """Returns the shapes of the tensors in a nested structure, as nested tuples."""
    if isinstance(data, dict):
        return tuple(map(shapes_of, data.values()))
    if isinstance(data, (list, tuple)):
        return tuple(map(shapes_of, data))
    return tuple(data.shape) if hasattr(data, "shape") else None


def begin(place: Place) -> None:
    """Makes this worker process write its stack to a file on `SIGNAL`, and when its watchdog timer expires."""
    global _file
    _file = open(_path(place), "w")  # noqa: SIM115  # open for as long as the process lives
    faulthandler.register(SIGNAL, file=_file)


def read_stack(place: Place) -> str:
    """Returns the stack that a worker has written; an empty string if the worker has not written a stack."""
    try:
        with open(_path(place)) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def seconds_without_a_move(place: Place) -> int:
    """Returns the timeout of a worker, in seconds, if its watchdog timer has expired. Otherwise returns 0."""
    found = re.match(r"Timeout \((\d+):(\d+):(\d+)", read_stack(place))
    hours, minutes, seconds = map(int, found.groups() if found else (0, 0, 0))
    return 3600 * hours + 60 * minutes + seconds


def describe_stacks(stacks: Mapping[str, str]) -> str:
    """Returns a text with the line of user code that each process executes.

    If a thread of kerasdp executes user code to read data, the text names the innermost line of this user code.
    Otherwise the text names the innermost line of user code in the main thread. Without user code, the text names the
    innermost line of the main thread.

    Args:
        stacks: results of `read_stack`, by name of the process. The main thread is the last thread of each stack.
    """
    words = []
    for name, text in stacks.items():
        *others, main = (_FRAME.findall(thread) for thread in text.strip().split("\n\n"))
        # While the main thread hangs elsewhere, the threads that read data wait for it, in code of kerasdp.
        reading = [frames for frames in others if any(error_text.is_of_kit(path) for path, *_ in frames)]
        of_user = (frame for frames in [*reading, main] for frame in frames if error_text.is_of_user(frame[0]))
        path, line, function = next(of_user, (main or [("", "", "")])[0])
        words.append(f"{name} is at {path}:{line}, in {function}" if path else f"{name} does not answer")
    return ", ".join(words)


def _path(place: Place) -> str:
    return os.path.join(place.folder, f"stack-{place.number}")
