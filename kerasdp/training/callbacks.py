"""The callbacks of every run: what people see, what is written down, and agreement between the processes."""

import contextlib
import os
import sys
import time
from typing import Any

import keras

from kerasdp.checkpoint import state as training_state
from kerasdp.checkpoint.callback import Checkpointer, resume
from kerasdp.config import CHECKPOINTS
from kerasdp.errors import UserError
from kerasdp.keras_compat import learning_rate_schedule
from kerasdp.reporting import report
from kerasdp.reporting.recorder import Recorder

# These write files: one process does it, or each would write over the others.
WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


class RunCallbacks(keras.callbacks.CallbackList):
    """The callbacks of one `fit`: the user's, and the run's own around them.

    They do not hear of the batches that a run that was resumed within an epoch passes over.

    Attributes:
        recorder: of the run.
        checkpointer: None if no checkpoints are kept.
        resumed: the checkpoint from which the run goes on, or None.
    """

    def __init__(
        self,
        runner: Any,
        model: keras.Model,
        feed: Any,
        callbacks: list[keras.callbacks.Callback],
        *,
        batch_size: int,
        epochs: int,
        verbose: str | int,
    ):
        """Makes them, and brings model and feed to the newest checkpoint with `config.resume`. Arguments as in `fit`.

        Raises:
            UserError: if one of the user's cannot work on several processes, or the run cannot be resumed.
        """
        callbacks = _checked(runner, callbacks)
        each_step = bool(callbacks)  # of all ranks, though only one has those that write
        if not runner.is_chief:
            callbacks = [callback for callback in callbacks if not isinstance(callback, WRITERS)]
        if verbose == "auto":
            verbose = runner.config.verbose
        if verbose is None:
            verbose = 1 if sys.stdout.isatty() else 2
        folder = runner.next_folder()
        checkpoints = os.path.join(folder, CHECKPOINTS) if runner.config.keeps_checkpoints else None
        identity = {}
        if checkpoints:
            stages = runner.strategy.stages
            rows = None if stages is None else stages.micro_batch_rows(model)
            identity = training_state.identity(runner.config, model, feed.reader, rows)
        self.resumed = resumed = resume(runner, model, identity, checkpoints) if runner.config.resume else None
        if resumed is not None:
            feed.resume_at(resumed.state["epoch"], resumed.state["batch"])
        self.recorder = recorder = Recorder(
            runner, model, feed, folder=folder, resumed=resumed, batch_size=batch_size, epochs=epochs, verbose=verbose
        )
        stateful = [*callbacks, keras.callbacks.History()]
        self.checkpointer = checkpoints and Checkpointer(
            runner, recorder, stateful, identity=identity, folder=checkpoints, resumed=resumed
        )
        if resumed is not None and feed.reader.has_own_order and runner.is_chief:
            report.warn(
                "the batches come from an object that keeps their order to itself: it must give the same ones again"
            )
        several = runner.strategy.processes.num_processes > 1
        super().__init__(
            [
                recorder,
                *stateful,
                *([Agreement(runner.strategy, each_step=each_step)] if several else []),
                *([Progress(recorder, epochs=epochs, bar=verbose == 1)] if runner.is_chief and verbose else []),
                *([Beating(recorder, runner.heartbeat)] if runner.heartbeat else []),
                *([self.checkpointer] if self.checkpointer else []),
            ],
            add_history=True,
            model=model,
            epochs=epochs,
            steps=feed.num_batches,
            verbose=0,
        )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """For a batch that is trained on."""
        if batch >= self.recorder.feed.num_skipped:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """For a batch that was trained on."""
        passed_over = self.recorder.feed.num_skipped
        if batch >= passed_over:
            self._tell("on_train_batch_end", batch, logs)
        elif self.recorder.is_at_last_step:
            self.model.stop_training = True
            if self.checkpointer:
                self.checkpointer.is_cut = passed_over != self.recorder.feed.num_batches

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """For a batch of an evaluation."""
        self._tell("on_test_batch_end", batch, logs)

    def _tell(self, event: str, batch: int, logs: Any) -> None:
        """Keras makes numbers of the logs of each step, which waits for the device: here only for those who look."""
        numbers = None
        for callback in self.callbacks:
            method = getattr(callback, event)
            # Keras' default one of a training step calls the older `on_batch_end`, as TerminateOnNaN has.
            is_deaf = _is_default(callback, event) and (
                event == "on_test_batch_end" or _is_default(callback, "on_batch_end")
            )
            if isinstance(callback, _READ_BY_THEMSELVES):
                method(batch, logs=logs)
            elif not is_deaf:
                numbers = _as_numbers(logs) if numbers is None else numbers
                method(batch, logs=numbers)

    def close(self) -> None:
        """Closes the files, also of a run that failed."""
        self.recorder.close()
        if self.checkpointer:
            self.checkpointer.close()
        if self.recorder.runner.heartbeat:
            self.recorder.runner.heartbeat.rest()


def _as_numbers(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns logs as Keras gives them to callbacks: sorted, nested ones among them, single values as floats."""
    numbers: dict[str, Any] = {}
    for name, value in sorted((logs or {}).items()):
        if isinstance(value, dict):
            numbers.update(_as_numbers(value))
            continue
        if keras.ops.is_tensor(value):
            value = keras.ops.convert_to_numpy(value)
        with contextlib.suppress(TypeError, ValueError):  # several values at once
            value = float(value)
        numbers[name] = value
    return numbers


def _is_default(callback: keras.callbacks.Callback, event: str) -> bool:
    """Whether a callback leaves a method as Keras has it."""
    return getattr(getattr(callback, event), "__func__", None) is getattr(keras.callbacks.Callback, event)


def _checked(runner: Any, callbacks: list[keras.callbacks.Callback] | None) -> list[keras.callbacks.Callback]:
    callbacks = callbacks or []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UserError("callbacks: expected a list of callbacks. Received: a CallbackList")
    own_way = runner.strategy.processes.num_processes > 1 or runner.config.keeps_checkpoints
    if own_way and any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise UserError(
            "BackupAndRestore puts back weights and epoch alone, on one process; leave it out, and use a workdir and "
            "--resume"
        )
    is_cut = runner.strategy.processes.num_processes > 1 and runner.config.strategy == "pipeline"
    for callback in callbacks:
        if is_cut and isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise UserError(
                "ModelCheckpoint(save_freq=...) saves within an epoch, when a process of a pipeline knows the weights "
                "of its own stages alone; use --checkpoint_every"
            )
    return callbacks


class Agreement(keras.callbacks.Callback):
    """Makes the processes agree on what callbacks decided: when to stop, and the learning rate.

    Most decide by the logs, which are equal everywhere; but one that looks at the clock, say, would leave the
    others waiting for a process that stopped.
    """

    def __init__(self, strategy: Any, *, each_step: bool):
        """`each_step`: whether a callback may stop within an epoch; to ask costs a wait for the device."""
        super().__init__()
        self.strategy, self.each_step = strategy, each_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops all ranks if one wants to stop."""
        if self.each_step:
            self.model.stop_training = self.strategy.processes.any_rank(self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Gives all ranks the learning rate of rank 0."""
        self.model.stop_training = self.strategy.processes.any_rank(self.model.stop_training)
        if learning_rate_schedule(self.model.optimizer) is None:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            (agreed,) = self.strategy.processes.broadcast_from_rank0([rate])
            if agreed != rate:
                self.model.optimizer.learning_rate = agreed


class Beating(keras.callbacks.Callback):
    """Marks the steps of this rank for its supervisor; see `kerasdp.runtime.heartbeat`."""

    def __init__(self, recorder: Recorder, heartbeat: Any):
        super().__init__()
        self.recorder, self.heartbeat, self.has_trained = recorder, heartbeat, False

    def _beat(self, is_behind: bool) -> None:
        if self.has_trained:  # the first step compiles for as long as it likes
            self.heartbeat.beat(self.recorder.step - is_behind, is_behind)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step begins."""
        self._beat(False)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A step is behind."""
        self.has_trained = True
        self._beat(True)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """An evaluation moves."""
        self._beat(True)


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
        values = [(name, value) for name, value in report.plain(_as_numbers(logs)).items() if isinstance(value, float)]
        # The trainer's values are already those of the epoch so far: shown as they are, not averaged again.
        self._progress.stateful_metrics = {name for name, _ in values} | {"images/s"}
        self._progress.update(step or 0, [*values, ("images/s", round(rate))], finalize=finalize)


# What they show or write of the logs they make numbers of when they do.
_READ_BY_THEMSELVES = (Recorder, Checkpointer, Agreement, Beating, Progress)
