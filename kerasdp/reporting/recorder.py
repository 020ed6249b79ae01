"""Counts and measures a run, and writes down what it did."""

import collections
import dataclasses
import math
import time
from typing import Any

import keras

from kerasdp.errors import NonFiniteLossError
from kerasdp.reporting import report, run_files
from kerasdp.runtime import signals
from kerasdp.runtime.run_state import Position


class Recorder(keras.callbacks.Callback):
    """Counts steps, measures time, stops at NaN and at `max_steps`, and writes the files of the run.

    Losses stay on the device until a line is due: reading each at once would make the host wait in every step.
    """

    def __init__(
        self,
        runner: Any,
        model: keras.Model,
        feed: Any,
        *,
        folder: str | None,
        resumed: Any,
        batch_size: int,
        epochs: int,
        verbose: int,
    ):
        """`folder` is where the files go, `resumed` the checkpoint from which the run goes on, or None for either."""
        super().__init__()
        self.runner, self.feed, self.verbose = runner, feed, verbose
        # What is used, also where the arguments of `fit` say otherwise than the flags.
        config = dataclasses.replace(runner.config, batch_size=batch_size, epochs=epochs)
        self._kept = resumed.state["recorder"] if resumed else None
        self.step = resumed.state["step"] if resumed else 0
        self.epoch_images = 0
        self.num_batches = 0
        self.epoch_seconds: list[float] = self._kept["epoch_seconds"] if resumed else []
        self.epoch_rates: list[float] = self._kept["epoch_rates"] if resumed else []
        self.last_logs = self._kept["last_logs"] if resumed else {}
        self._waiting: collections.deque[tuple[int, Any]] = collections.deque()
        # When the last line was written, at how many images of the epoch; steps and rates of the lines to come.
        self._line = (0.0, 0)
        self._due: list[tuple[int, Any]] = []
        self._told = self.step
        # When the epoch began, and how long its training part took; None outside of an epoch, and until it is over.
        self._clock: float | None = None
        self._seconds: float | None = None
        self.facts = report.Facts(
            config=config,
            devices=str(runner.devices),
            device_kind=runner.devices.kind,
            num_devices=runner.strategy.num_devices,
            num_replicas=runner.config.num_replicas(runner.devices.count),
            num_processes=runner.strategy.processes.num_processes,
            model=model.name,
            global_batch_size=batch_size,
        )
        self.files = None
        if folder is not None and runner.is_chief:
            self.files = run_files.RunFiles(
                folder,
                self.facts,
                tensorboard=config.tensorboard,
                last_step=self.step,
                history=self._kept["history"] if resumed else [],
            )
        self._resumed = resumed
        state = resumed.state if resumed else {"stopped": False, "epoch": 0, "batch": 0}
        # Whether the run that was resumed had come to its end, of itself or because a callback stopped it.
        self.was_over = not state["batch"] and (state["stopped"] or state["epoch"] >= epochs or self.is_at_last_step)
        if resumed:
            runner.state.resume(
                self.step,
                Position(state["epoch"], state["batch"]),
                was_stopped=state["stopped"],
                **{name: self._kept[name] for name in ("epoch_seconds", "epoch_rates", "images", "seconds")},
            )
        runner.state.add_listener(self._on_step)

    @property
    def is_at_last_step(self) -> bool:
        """Whether `max_steps` are done."""
        last = self.runner.config.max_steps
        return last is not None and self.step >= last

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: enough for the files of the run to go on without a gap."""
        return {
            "epoch_seconds": self.epoch_seconds,
            "epoch_rates": self.epoch_rates,
            "last_logs": self.last_logs,
            "history": self.files.history if self.files else [],
            # Of the epoch that is running.
            "images": 0 if self._clock is None else self.epoch_images,
            "seconds": 0.0 if self._clock is None else self._seconds or time.perf_counter() - self._clock,
        }

    def _on_step(self, loss: Any, learning_rate: Any, num_rows: int) -> None:
        self.step += 1
        self.num_batches += 1
        self._waiting.append((self.step, loss))
        if self.step % self.runner.config.log_every == 0:
            self._due.append((self.step, learning_rate))
        self.epoch_images += num_rows

    def on_train_begin(self, logs: Any = None) -> None:
        """Says what is about to run."""
        if self.verbose and self.runner.is_chief:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            description = self.runner.strategy.description(self.model)
            print(*filter(None, [report.start_line(self.facts, rate), description]), sep="\n", flush=True)
            if self._resumed:
                saved = self._resumed.state
                is_over = self.was_over or self.is_at_last_step
                line = report.resume_line(saved["step"], saved["epoch"], saved["saved_by"], is_over=is_over)
                print(line, flush=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self.feed.current_epoch = self.epoch = epoch
        kept, self._kept = self._kept or {"images": 0, "seconds": 0.0}, None
        self.epoch_images = kept["images"]
        self.num_batches = self.feed.num_skipped
        now = time.perf_counter()
        self._clock, self._seconds = now - kept["seconds"], None
        self._line = (now, self.epoch_images)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes a line every `log_every` steps, when the next step is on its way: the device need not wait."""
        signals.leave_if_asked()
        self._write_lines(self._told)
        self._told = self.step
        self._due = [(step, self._learning_rate() if rate is None else rate) for step, rate in self._due]
        if self.is_at_last_step:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        """The training part of the epoch is over."""
        self._stop_clock()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's row, and brings the model together for the callbacks that save it."""
        self.runner.strategy.gather_variables(self._model)
        self._stop_clock()
        self.epoch_seconds.append(self._seconds)
        self.runner.epoch_seconds = self.epoch_seconds
        self.epoch_rates.append(self.epoch_images / self._seconds)
        self._clock = None
        logs = report.plain(logs)
        if self.files:
            self.files.add_epoch(epoch, logs, self.epoch_seconds[-1], self.epoch_rates[-1])
        self.last_logs = logs

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the report and says how it went."""
        runner = self.runner
        if not runner.is_chief or not self.epoch_seconds:
            return
        result = report.result(
            self.facts,
            steps=self.step,
            final=self.last_logs,
            epoch_seconds=self.epoch_seconds,
            epoch_rates=self.epoch_rates,
            peak_memory_bytes=runner.strategy.peak_memory_bytes(),
        )
        if self.files:
            self.files.add_result(result)
        if self.verbose:
            print(report.end_line(self.facts, result), flush=True)

    def close(self) -> None:
        """Closes the files, also of a run that failed."""
        self.runner.state.remove_listener(self._on_step)
        if self.files:
            self.files.close()

    def _stop_clock(self) -> None:
        if self._seconds is None:
            self.catch_up()  # waits for the last step
            self._seconds = time.perf_counter() - self._clock

    def catch_up(self) -> None:
        """Waits for the last step, stops the run if a loss is not a number, and writes the line that is due."""
        self._write_lines(self.step)
        self._read_losses(self.step)

    def _write_lines(self, last_step: int) -> None:
        """Those up to this step; with several steps a call they may be several, at the speed of all together."""
        lines = [(step, self._read_losses(step), float(rate)) for step, rate in self._due if step <= last_step]
        if not lines:
            return
        del self._due[: len(lines)]
        now = time.perf_counter()
        seconds, images = now - self._line[0], self.epoch_images - self._line[1]
        self._line = (now, self.epoch_images)
        for step, loss, rate in lines if self.files else ():
            self.files.add_step(step, self.epoch, loss, rate, images / seconds)

    def _read_losses(self, last_step: int) -> float:
        """The loss of a step; stops the run at the first one up to there that is not a number."""
        last = math.nan
        while self._waiting and self._waiting[0][0] <= last_step:
            step, loss = self._waiting.popleft()
            if loss is None:  # a train_step of the user's own that does not tell it
                continue
            last = float(loss)
            if not math.isfinite(last):
                raise NonFiniteLossError(
                    f"the loss became {last} at step {step} (epoch {self.epoch + 1}) with learning rate "
                    f"{self._learning_rate():.3g}; try a lower --learning_rate"
                )
        return last

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
