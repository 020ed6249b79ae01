"""The callbacks of every run: what people see, what is written down, and agreement between the processes."""

import dataclasses
import math
import os
import sys
import time
from typing import Any

import keras

from kerasdp import report
from kerasdp.errors import NonFiniteLossError, UserError

# These write files: one process does it, or each would write over the others.
WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


def run_callbacks(
    runner: Any,
    model: keras.Model,
    feed: Any,
    callbacks: list[keras.callbacks.Callback],
    *,
    batch_size: int,
    epochs: int,
    verbose: str | int,
) -> list[keras.callbacks.Callback]:
    """The callbacks of one `fit`: the user's, and the run's own around them.

    Raises:
        UserError: if one of the user's cannot work on several processes.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UserError("callbacks: expected a list of callbacks. Received: a CallbackList")
    several = runner.replicas.num_processes > 1
    if several and any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise UserError("BackupAndRestore cannot restore several processes; use ModelCheckpoint, or one device")
    each_step = bool(callbacks)  # of all ranks, though only one has those that write
    if not runner.is_chief:
        callbacks = [callback for callback in callbacks if not isinstance(callback, WRITERS)]
    if verbose == "auto":
        verbose = runner.config.verbose
    if verbose is None:
        verbose = 1 if sys.stdout.isatty() else 2
    recorder = Recorder(runner, model, feed, batch_size=batch_size, epochs=epochs, verbose=int(verbose))
    own = [recorder]
    if runner.is_chief and verbose:
        own.append(Progress(recorder, epochs=epochs, bar=verbose == 1))
    agreement = [Agreement(runner.replicas, each_step=each_step)] if several else []
    return [own[0], *callbacks, *agreement, *own[1:]]


class Recorder(keras.callbacks.Callback):
    """Counts steps, measures time, stops at NaN and at `max_steps`, and writes the files of the run.

    Losses stay on the device until a line is due: reading each at once would make the host wait in every step.
    """

    def __init__(self, runner: Any, model: keras.Model, feed: Any, *, batch_size: int, epochs: int, verbose: int):
        super().__init__()
        self.runner, self.feed, self.verbose = runner, feed, verbose
        # What is used, also where the arguments of `fit` say otherwise than the flags.
        config = dataclasses.replace(runner.config, batch_size=batch_size, epochs=epochs)
        self.step = 0
        self.epoch_images = 0
        self.epoch_seconds: list[float] = []
        self.epoch_rates: list[float] = []
        self._waiting: list[tuple[int, Any]] = []
        self._line = (0.0, 0)
        self._clock: float | None = None
        self.facts = report.Facts(
            config=config,
            devices=str(runner.devices),
            device_kind=runner.devices.kind,
            num_devices=runner.num_replicas,
            num_processes=runner.replicas.num_processes,
            model=model.name,
            global_batch_size=batch_size,
        )
        self.files = None
        if config.workdir is not None and runner.is_chief:
            # A second `fit` of the same run leaves the first one's files alone.
            runner.num_fits += 1
            folder = config.workdir if runner.num_fits == 1 else os.path.join(config.workdir, f"fit-{runner.num_fits}")
            self.files = report.RunFiles(folder, self.facts, tensorboard=config.tensorboard)
        runner.on_step = self._on_step

    def _on_step(self, loss: Any, num_rows: int) -> None:
        self._waiting.append((self.step, loss))
        self.epoch_images += num_rows

    def on_train_begin(self, logs: Any = None) -> None:
        """Says what is about to run."""
        if self.verbose and self.runner.is_chief:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            print(report.start_line(self.facts, rate), flush=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self.feed.current_epoch = self.epoch = epoch
        self.epoch_images = 0
        self._clock = time.perf_counter()
        self._line = (self._clock, 0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes a line every `log_every` steps."""
        self.step += 1
        config = self.runner.config
        if self.step % config.log_every == 0:
            loss = self._read_losses()
            now = time.perf_counter()
            seconds, images = now - self._line[0], self.epoch_images - self._line[1]
            self._line = (now, self.epoch_images)
            if self.files:
                self.files.add_step(self.step, self.epoch, loss, self._learning_rate(), images / seconds)
        if config.max_steps is not None and self.step >= config.max_steps:
            self.model.stop_training = True

    def on_test_begin(self, logs: Any = None) -> None:
        """The training part of the epoch is over."""
        self._stop_clock()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's row."""
        self._stop_clock()
        logs = report.plain(logs)
        if self.files:
            self.files.add_epoch(epoch, logs, self.epoch_seconds[-1], self.epoch_rates[-1])
        self.last_logs = logs

    def on_train_end(self, logs: Any = None) -> None:
        """Writes the report and says how it went."""
        runner = self.runner
        runner.on_step = lambda loss, num_rows: None
        if not runner.is_chief or not self.epoch_seconds:
            return
        result = report.result(
            self.facts,
            steps=self.step,
            final=self.last_logs,
            epoch_seconds=self.epoch_seconds,
            epoch_rates=self.epoch_rates,
            peak_memory_bytes=runner.replicas.peak_memory_bytes(),
        )
        if self.files:
            self.files.add_result(result)
        if self.verbose:
            print(report.end_line(self.facts, result), flush=True)

    def close(self) -> None:
        """Closes the files, also of a run that failed."""
        if self.files:
            self.files.close()

    def _stop_clock(self) -> None:
        if self._clock is None:
            return
        self._read_losses()  # waits for the last step
        seconds = time.perf_counter() - self._clock
        self._clock = None
        self.epoch_seconds.append(seconds)
        self.epoch_rates.append(self.epoch_images / seconds)

    def _read_losses(self) -> float:
        """The loss of the last step; stops the run at the first one that is not a number."""
        last = math.nan
        waiting, self._waiting = self._waiting, []
        for step, loss in waiting:
            if loss is None:  # a train_step of the user's own that does not tell it
                continue
            last = float(loss)
            if not math.isfinite(last):
                raise NonFiniteLossError(
                    f"the loss became {last} at step {step + 1} (epoch {self.epoch + 1}) with learning rate "
                    f"{self._learning_rate():.3g}; try a lower --learning_rate"
                )
        return last

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))


class Agreement(keras.callbacks.Callback):
    """Makes the processes agree on what callbacks decided: when to stop, and the learning rate.

    Most decide by the logs, which are equal everywhere; but one that looks at the clock, say, would leave the
    others waiting for a process that stopped.
    """

    def __init__(self, replicas: Any, *, each_step: bool):
        """`each_step`: whether a callback may stop within an epoch; to ask costs a wait for the device."""
        super().__init__()
        self.replicas, self.each_step = replicas, each_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops all ranks if one wants to stop."""
        if self.each_step:
            self.model.stop_training = self.replicas.any(self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Gives all ranks the learning rate of rank 0."""
        self.model.stop_training = self.replicas.any(self.model.stop_training)
        if not isinstance(self.model.optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            (agreed,) = self.replicas.agree([rate])
            if agreed != rate:
                self.model.optimizer.learning_rate = agreed


class Progress(keras.callbacks.Callback):
    """A progress bar with loss, metrics and images a second, or a line an epoch."""

    seconds_between_updates = 0.1

    def __init__(self, recorder: Recorder, *, epochs: int, bar: bool):
        super().__init__()
        self.recorder, self.epochs, self.bar = recorder, epochs, bar
        self._progress: Any = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts a bar."""
        self._start = self._last_update = time.perf_counter()
        if self.bar:
            print(f"epoch {epoch + 1}/{self.epochs}")
            self._progress = keras.utils.Progbar(
                target=self.recorder.feed.num_batches, unit_name="step", stateful_metrics=None
            )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Moves the bar, ten times a second at most: each move waits for the device."""
        now = time.perf_counter()
        if self.bar and now - self._last_update > self.seconds_between_updates:
            self._last_update = now
            self._draw(batch + 1, logs, self.recorder.epoch_images / (now - self._start), finalize=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the bar, or prints the line."""
        rate = self.recorder.epoch_rates[-1]
        if self.bar:
            self._draw(self.recorder.feed.num_batches, logs, rate, finalize=True)
        else:
            print(
                report.epoch_line(epoch, self.epochs, report.plain(logs), self.recorder.epoch_seconds[-1], rate),
                flush=True,
            )

    def _draw(self, step: int | None, logs: dict[str, Any] | None, rate: float, *, finalize: bool) -> None:
        values = [(name, value) for name, value in report.plain(logs).items() if isinstance(value, float)]
        # The trainer's values are already those of the epoch so far: shown as they are, not averaged again.
        self._progress.stateful_metrics = {name for name, _ in values} | {"images/s"}
        self._progress.update(step or 0, [*values, ("images/s", round(rate))], finalize=finalize)
