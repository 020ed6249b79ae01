"""Runs a training in processes of its own, and hears of each of its epochs.

Ray (2.60) calls a worker's function in a thread, where no signal is handled. And Ray's `report` does not exist in the
processes that train.
"""

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.config import Config
from kerasdp.launch import launch
from kerasdp.runtime.sending import SentFunction, SentResult
from kerasdp.sweep.trials import in_own_process

_SECONDS_BETWEEN_LOOKS = 0.1


def train_and_report(train: SentFunction, settings: Config, report: Callable[[dict[str, Any]], None]) -> SentResult:
    """Runs `kerasdp.launch(train, settings)` in a new process; returns what `train` returned.

    Args:
        train: the user-defined function.
        settings: the choices of the run.
        report: called after each epoch, in a thread of this process, with its number from 1 and its metrics.

    Raises:
        RunError: as `kerasdp.launch`.
    """
    with tempfile.TemporaryDirectory(prefix="kerasdp-", ignore_cleanup_errors=True) as folder:
        path = os.path.join(folder, "epochs.jsonl")

        def reporting(runner: Any) -> Any:
            if runner.strategy.processes.local[0] == 0:
                runner.state.epoch_listeners.append(lambda epoch, logs: _report(path, {"epoch": epoch + 1, **logs}))
            return train(runner)

        with _followed(path, report):
            return SentResult(launch(reporting, in_own_process(settings)))


def _report(path: str, line: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def _followed(path: str, report: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Calls `report` for each line of a file that grows within the context, in a thread."""
    open(path, "w").close()
    is_over, failures = threading.Event(), list[BaseException]()

    def follow() -> None:
        try:
            with open(path) as file:
                for line in _lines(file, is_over):
                    report(json.loads(line))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=follow, daemon=True, name="reports")
    thread.start()
    yield  # whoever fails leaves reports alone: they may wait for workers that are gone
    is_over.set()
    thread.join()
    if failures:
        raise failures[0]


def _lines(file: Any, is_over: threading.Event) -> Iterator[str]:
    begun = ""
    while True:
        is_last = is_over.wait(_SECONDS_BETWEEN_LOOKS)
        while text := file.readline():
            begun += text
            if begun.endswith("\n"):
                yield begun
                begun = ""
        if is_last:
            return
