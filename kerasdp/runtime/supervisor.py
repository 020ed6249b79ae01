"""Watches over a run: restarts it from its last checkpoint when a worker dies, and ends it when one hangs."""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from kerasdp.config import Config
from kerasdp.errors import WorkerError
from kerasdp.runtime import signals
from kerasdp.runtime.heartbeat import find_hanging
from kerasdp.runtime.processes import call_in_new_process


def supervise(work: Callable[..., Any], settings: Config, train: Callable[..., Any]) -> Any:
    """Runs `work(settings, train, folder)` in a process of its own, restarts it if allowed; returns its result.

    Args:
        work: runs the workers.
        settings: `max_restarts` and `hang_timeout` are read.
        train: the user-defined function.

    Raises:
        WorkerError: if a worker died or hung, and `max_restarts` are used up.
    """
    for restart in range(1, settings.max_restarts + 2):
        try:
            return _watch(work, settings, train)
        except WorkerError as error:
            if restart > settings.max_restarts or signals.noted() is not None:
                raise
            line = f"restart {restart} of {settings.max_restarts}, from the last checkpoint"
            print(f"{error}\n{line}", file=sys.stderr, flush=True)
        settings = dataclasses.replace(settings, resume=True)
    raise AssertionError("not reached")


def _watch(work: Callable[..., Any], settings: Config, train: Callable[..., Any]) -> Any:
    found: list[str] = []
    is_over = threading.Event()

    def look_for_hanging(process: Any, folder: str, timeout: float) -> None:
        while not is_over.wait(0.5):
            hanging = find_hanging(folder, timeout)
            if hanging is None:
                continue
            found.append(hanging[0])
            kill(hanging[1])
            if not is_over.wait(10):  # with torch it has workers of its own, and ends in order when they are gone
                kill([process.pid])
            return

    def kill(processes: list[int]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    with tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True) as folder:

        def start_to_look(process: Any) -> None:
            if settings.hang_timeout is not None:
                arguments = (process, folder, settings.hang_timeout)
                threading.Thread(target=look_for_hanging, args=arguments, daemon=True).start()

        try:
            return call_in_new_process(work, settings, train, folder, name="the worker", on_start=start_to_look)
        except WorkerError:
            if found:
                raise WorkerError(found[0]) from None
            raise
        finally:
            is_over.set()
