"""Watches over a run: restarts it from its last checkpoint when a worker dies, and ends it when one hangs."""

import dataclasses
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from kerasdp.config import Config
from kerasdp.errors import WorkerError, from_name
from kerasdp.runtime import rank_files, signals
from kerasdp.runtime.processes import call_in_new_process
from kerasdp.runtime.watch import Watch


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
    # With torch on several devices the worker starts others, and watches over them itself.
    with (
        tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True) as folder,
        Watch(folder, 1, settings.hang_timeout or None) as watch,
    ):
        try:
            return call_in_new_process(work, settings, train, folder, name="the worker")
        except (WorkerError, SystemExit) as error:
            if watch.error is not None:
                raise watch.error from None
            for record in rank_files.read_errors(folder).values():  # as another machine's, which it could not raise
                raise from_name(record["name"], record["message"]) or error from None
            raise
