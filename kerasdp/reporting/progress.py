"""Shows a run while it trains: how far an epoch is, and the curves, in a notebook or in a terminal."""

import contextlib
import os
import sys
import time
from typing import Any

import keras

from kerasdp.reporting import report
from kerasdp.reporting.figure import FOLDER
from kerasdp.reporting.run_files import draw_curves
from kerasdp.runtime.run_state import RunState


class Progress(keras.callbacks.Callback):
    """Shows a progress bar with loss, metrics and images a second, or prints a line an epoch."""

    seconds_between_updates = 0.1

    def __init__(self, run_state: RunState, *, bar: bool):
        super().__init__()
        self.run_state, self.bar = run_state, bar
        self._progress: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts a bar."""
        self._start = self._last_update = time.perf_counter()
        if self.bar:
            report.say(f"epoch {epoch + 1}/{self.run_state.epochs}")
            self._progress = keras.utils.Progbar(
                target=self.run_state.num_batches, unit_name="step", stateful_metrics=None
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Moves the bar, ten times a second at most: each move waits for the device."""
        now = time.perf_counter()
        if self.bar and now - self._last_update > self.seconds_between_updates:
            self._last_update = now
            self._draw(batch + 1, logs, self.run_state.epoch_images / (now - self._start), finalize=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the bar, or prints the line."""
        seconds, rate = self.run_state.epoch_seconds[-1], self.run_state.epoch_rates[-1]
        if self.bar:
            self._draw(self.run_state.num_batches, logs, rate, finalize=True)
        else:
            report.say(report.epoch_line(epoch, self.run_state.epochs, report.plain(logs), seconds, rate))

    def _draw(self, step: int | None, logs: dict[str, Any] | None, rate: float, *, finalize: bool) -> None:
        values = [(name, value) for name, value in report.plain(as_numbers(logs)).items() if isinstance(value, float)]
        # The values are already those of the epoch so far: shown as they are, not averaged again.
        self._progress.stateful_metrics = {name for name, _ in values} | {"images/s"}
        self._progress.update(step or 0, [*values, ("images/s", round(rate))], finalize=finalize)


def as_numbers(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns logs as Keras gives them to callbacks: sorted, nested ones among them, single values as floats."""
    numbers: dict[str, Any] = {}
    for name, value in sorted((logs or {}).items()):
        if isinstance(value, dict):
            numbers.update(as_numbers(value))
            continue
        if keras.ops.is_tensor(value):
            value = keras.ops.convert_to_numpy(value)
        with contextlib.suppress(TypeError, ValueError):  # several values at once
            value = float(value)
        numbers[name] = value
    return numbers


_HEIGHTS = "▁▂▃▄▅▆▇█"


class LiveCurve(keras.callbacks.Callback):
    """Draws the curves again after each epoch, in the notebook that started the run, or else in a terminal."""

    def __init__(self, facts: report.Facts, *, fit: int, history: list[dict[str, Any]] | None = None):
        """Starts with what is known.

        Args:
            facts: what is known of the run.
            fit: its number of this `fit`, from 1.
            history: rows of the epochs before a resume, as in history.csv.
        """
        super().__init__()
        self.facts, self.fit, self.history = facts, fit, list(history or [])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Draws, where somebody can see it."""
        self.history.append({"epoch": epoch + 1, **report.plain(logs)})
        folder = os.environ.get(FOLDER)
        if folder is not None:
            path = os.path.join(folder, f"fit-{self.fit:04d}.png")
            draw_curves(self.history, f"{path}.new", self.facts.title)
            if os.path.exists(f"{path}.new"):
                os.replace(f"{path}.new", path)
        elif sys.stdout.isatty():
            report.say(curve_line(self.history))


def curve_line(history: list[dict[str, Any]], width: int = 40) -> str:
    """Draws the losses of the last epochs as a line of text, high ones as high blocks.

    Args:
        history: a dictionary per epoch, as the rows of history.csv.
        width: the most epochs that are shown.

    Returns:
        As `loss 2.31 █▅▂▁ 0.12 - val_loss 2.01 █▃▁▁ 0.25`.
    """
    parts = []
    for name in ("loss", "val_loss"):
        values = [row[name] for row in history if isinstance(row.get(name), float)][-width:]
        if values:
            low, high = min(values), max(values)
            steps = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
            blocks = "".join(_HEIGHTS[round((value - low) * steps)] for value in values)
            parts.append(f"{name} {values[0]:.4g} {blocks} {values[-1]:.4g}")
    return " - ".join(parts)
