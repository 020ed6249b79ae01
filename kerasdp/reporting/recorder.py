"""Observes a run while it trains: writes the files, prints the first and last lines, and shows the progress."""

import collections
import contextlib
import math
import os
import time
from typing import Any

import keras

from kerasdp.contract import Strategy
from kerasdp.errors import NonFiniteLossError
from kerasdp.keras_compat.optimizers import inner_optimizer, learning_rate_schedule
from kerasdp.reporting import report, run_files
from kerasdp.run_state import RunState

# Warns if the first loss exceeds the chance loss by this factor. New models on scaled inputs have at most factor two.
_FAR_ABOVE = 10


class Recorder(keras.callbacks.Callback):
    """Writes the files of a run, prints its first and last lines, and stops the run if the loss is not finite.

    Losses stay on the device until a line of steps.jsonl is due. To read each loss immediately, the host would have to
    wait for the device in every step.
    """

    def __init__(
        self,
        run_state: RunState,
        facts: report.Facts,
        strategy: Strategy,
        *,
        folder: str | None,
        saved: dict[str, Any] | None = None,
        verbose: bool = False,
    ):
        """Registers the recorder as a listener for steps.

        Args:
            run_state: state of the run, already at the resume point if there is one.
            facts: description of the run.
            strategy: strategy of the run.
            folder: folder for the files; None: no files.
            saved: state in the checkpoint from which the run resumes; None in a new run.
            verbose: whether to print the lines.
        """
        super().__init__()
        self.run_state, self.facts, self.strategy = run_state, facts, strategy
        self.verbose, self._saved = verbose, saved
        recorded = saved["recorder"] if saved else {"last_logs": {}, "history": []}
        self.last_logs: dict[str, Any] = recorded["last_logs"]
        # Steps whose loss is not read yet: step number, loss, and images of the epoch before the step.
        self._waiting: collections.deque[tuple[int, Any, int]] = collections.deque()
        # Start of the speed measurement (time, images of the epoch), and the last measured speed.
        self._start, self._speed = (0.0, 0), 0.0
        # Steps and learning rates of the lines that are due.
        self._due: list[tuple[int, Any]] = []
        self._last_step = run_state.step
        # Sum and number of the epoch's losses that were read.
        self._losses: list[float] = [*recorded.get("losses", (0.0, 0))]
        self.files = None
        # A finished run keeps its files. It may be trained by another backend, on other devices.
        self._is_told = bool(folder) and run_state.was_over and os.path.exists(f"{folder}/report.json")
        if folder is not None and not self._is_told:
            self.files = run_files.RunFiles(folder, facts, last_step=run_state.step, history=recorded["history"])
        run_state.add_listener(self._on_step)

    def saved_state(self) -> dict[str, Any]:
        """Returns the values to save in a checkpoint, so that the files of a resumed run have no gap."""
        history = self.files.history if self.files else []
        known = {"last_logs": self.last_logs, "history": history, "losses": self._losses[:]}
        return self.run_state.measurements() | known

    def _on_step(self, loss: Any, learning_rate: Any, num_rows: int) -> None:
        step = self.run_state.step
        self._waiting.append((step, loss, self.run_state.epoch_images - num_rows))
        if step % self.facts.config.log_every == 0:
            self._due.append((step, learning_rate))

    def on_train_begin(self, logs: Any = None) -> None:
        """Prints the first lines of the run."""
        if not self.verbose:
            return
        first = report.start_line(self.facts, self._learning_rate(), self._update_rule()["schedule"])
        rows = self.strategy.split.micro_batch_rows
        passes = "" if rows is None else f"gradients are summed over micro-batches of {rows} samples"
        lines = [first, self.run_state.description, passes]
        if self._saved:
            is_over = self.run_state.was_over or self.run_state.is_at_last_step
            lines.append(report.resume_line(self._saved, is_over=is_over))
        report.say(*filter(None, lines))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to measure the speed of the epoch."""
        self._start = (time.perf_counter(), self.run_state.epoch_images)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the due lines of steps.jsonl: one line for every `log_every` steps.

        Writes each line one step late. At that time, the device already computes the next step, and does not have to
        wait.
        """
        self._write_lines(self._last_step)
        self._last_step = self.run_state.step
        self._due = [(step, self._learning_rate() if rate is None else rate) for step, rate in self._due]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the row of the epoch to history.csv."""
        self.last_logs, self._losses = report.plain(logs), [0.0, 0]
        if self.files:
            seconds, rate = self.run_state.epoch_seconds[-1], self.run_state.epoch_rates[-1]
            self.files.add_epoch(epoch, self.last_logs, seconds, rate)

    def on_train_end(self, logs: Any = None) -> None:
        """Writes report.json and prints the result."""
        if not (self.files or self.verbose) or not self.run_state.epoch_seconds or self._is_told:
            return
        memory = self.strategy.peak_memory_bytes()
        result = report.result(self.facts, self.run_state, self._update_rule(), self.last_logs, memory)
        if self.files:
            self.files.add_result(result)
        if self.verbose:
            report.say(report.end_line(self.facts, result))

    def close(self) -> None:
        """Closes the files and removes the listener. A failed run calls this method, too."""
        self.run_state.remove_listener(self._on_step)
        if self.files:
            self.files.close()

    def mean_loss(self) -> float:
        """Returns the mean of the epoch's losses. Each batch has the same weight."""
        total, number = self._losses
        return total / number if number else 0.0

    def catch_up(self) -> None:
        """Waits for the last step, stops the run if a loss is not finite, and writes the due lines of steps.jsonl."""
        self._write_lines(self.run_state.step)
        self._read_losses(self.run_state.step)

    def _write_lines(self, last_step: int) -> None:
        """Writes the due lines of steps.jsonl, up to step `last_step`.

        All lines that are written together show the same speed.
        """
        lines = [(step, self._read_losses(step), _as_written(rate)) for step, rate in self._due if step <= last_step]
        if not lines:
            return
        del self._due[: len(lines)]
        now, num_images = time.perf_counter(), self._num_images_done()
        if num_images > self._start[1]:
            self._speed = (num_images - self._start[1]) / (now - self._start[0])
            self._start = (now, num_images)
        if self.files:
            for step, loss, rate in lines:
                self.files.add_step(step, self.run_state.epoch, loss, rate, self._speed)

    def _num_images_done(self) -> int:
        """Returns the number of images in the finished steps of the epoch.

        With JAX the newest step may still run.
        """
        running = (before for _, loss, before in self._waiting if not getattr(loss, "is_ready", lambda: True)())
        return next(running, self.run_state.epoch_images)

    def _read_losses(self, last_step: int) -> float:
        """Reads the losses of the steps up to `last_step`. Returns the last of these losses.

        Raises:
            NonFiniteLossError: for the first of these losses that is not finite.
        """
        last = math.nan
        for step, loss, _ in self._waiting:
            if step <= last_step:
                # JAX only: starts all copies before it waits for the first one.
                getattr(loss, "copy_to_host_async", lambda: None)()
        while self._waiting and self._waiting[0][0] <= last_step:
            step, loss, _ = self._waiting.popleft()
            if loss is None:  # a user-defined train_step that returns no loss
                continue
            last = float(loss)
            chance = self.facts.chance_loss
            if step == 1 and chance and chance * _FAR_ABOVE < last < math.inf and self.strategy.processes.rank == 0:
                report.warn(
                    f"the first loss is {last:.5g}, but random guesses have a loss of {chance:.2g}; scale the inputs "
                    "(images from 0 to 255 with keras.layers.Rescaling(1 / 255)), or check the labels and from_logits"
                )
            self._losses = [self._losses[0] + last, self._losses[1] + 1]
            if not math.isfinite(last):
                raise NonFiniteLossError(
                    f"the loss became {last} at step {step} (epoch {self.run_state.epoch + 1}) with learning rate "
                    f"{self._learning_rate():.3g}; try a lower --learning_rate, or check the data for NaN"
                )
        return last

    def _learning_rate(self) -> float:
        return _as_written(self.model.optimizer.learning_rate)

    def _update_rule(self) -> dict[str, Any]:
        """Returns the name of the optimizer, the learning rate of the first update, and the name of the schedule."""
        optimizer = inner_optimizer(self.model.optimizer)
        schedule = learning_rate_schedule(optimizer)
        first = self._learning_rate() if schedule is None else _as_written(schedule(0))
        name = "constant" if schedule is None else type(schedule).__name__
        return {"optimizer": type(optimizer).__name__, "learning_rate": first, "schedule": name}


def _as_written(rate: Any) -> float:
    """Converts a learning rate to a float with few digits.

    The float has the fewest digits that identify the rate in its precision: 0.03, not 0.029999999329447746.
    """
    return float(str(keras.ops.convert_to_numpy(rate)))


class Progress(keras.callbacks.Callback):
    """Shows a progress bar with loss, metrics and speed, or prints one line for each epoch."""

    seconds_between_updates = 0.1

    def __init__(self, run_state: RunState, *, bar: bool):
        super().__init__()
        self.run_state, self.bar = run_state, bar
        self._progress: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts a progress bar."""
        self._last_update = time.perf_counter()
        if self.bar:
            report.say(f"epoch {epoch + 1}/{self.run_state.epochs}")
            self._progress = keras.utils.Progbar(target=self.run_state.num_batches, unit_name="step")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Updates the bar at most ten times a second, because each update waits for the device."""
        now = time.perf_counter()
        if self.bar and now - self._last_update > self.seconds_between_updates:
            self._last_update = now
            self._draw(batch + 1, logs, finalize=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the bar, or prints the line of the epoch."""
        seconds, rate = self.run_state.epoch_seconds[-1], self.run_state.epoch_rates[-1]
        if self.bar:
            # Only in the last bar. Other bars would be wider than a terminal, and each would leave a line.
            self._progress.unit_name = f"step, {rate:,.0f} samples/s"
            self._draw(self.run_state.num_batches, logs, finalize=True)
        else:
            report.say(report.epoch_line(epoch, self.run_state.epochs, report.plain(logs), seconds, rate))

    def _draw(self, step: int | None, logs: dict[str, Any] | None, *, finalize: bool) -> None:
        values = [(name, value) for name, value in report.plain(as_numbers(logs)).items() if isinstance(value, float)]
        # The values are already averaged over the epoch so far, so the bar must not average them again.
        self._progress.stateful_metrics = {name for name, _ in values}
        self._progress.update(step or 0, values, finalize=finalize)


def as_numbers(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns logs in the form that Keras passes to callbacks.

    Sorts the logs by name, flattens nested logs, and converts scalars to floats.
    """
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
