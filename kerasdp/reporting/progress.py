"""Shows how far an epoch is."""

import contextlib
import time
from typing import Any

import keras

from kerasdp.reporting import report
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
            print(f"epoch {epoch + 1}/{self.run_state.epochs}")
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
            print(report.epoch_line(epoch, self.run_state.epochs, report.plain(logs), seconds, rate), flush=True)

    def _draw(self, step: int | None, logs: dict[str, Any] | None, rate: float, *, finalize: bool) -> None:
        values = [(name, value) for name, value in report.plain(as_numbers(logs)).items() if isinstance(value, float)]
        # The trainer's values are already those of the epoch so far: shown as they are, not averaged again.
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
