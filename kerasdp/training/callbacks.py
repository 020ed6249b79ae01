"""Calls the callbacks of one `fit`: those that flags ask for, and all on all ranks alike."""

import sys
from typing import Any

import keras

from kerasdp.checkpoint import state as training_state
from kerasdp.checkpoint.checkpointer import Checkpointer, resume
from kerasdp.config import Config
from kerasdp.contract import Strategy
from kerasdp.data.batch import Reader
from kerasdp.errors import UserError
from kerasdp.keras_compat.optimizers import learning_rate_schedule
from kerasdp.processes import signals
from kerasdp.reporting import report
from kerasdp.reporting.recorder import Progress, Recorder, as_numbers
from kerasdp.run_state import Position, RunState

# These write files: one process does it, or each would write over the others.
WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


class RunCallbacks(keras.callbacks.CallbackList):
    """The callbacks of one `fit`: the user's and built-in ones, in any order.

    What must come first and last is no callback: each event updates `RunState`, then calls the callbacks, then
    synchronizes the ranks and writes the checkpoint that holds what the callbacks left.

    Attributes:
        recorder: of the run.
        checkpointer: None if no checkpoints are written.
        resumed: the checkpoint from which the run resumes, or None.
    """

    def __init__(
        self,
        config: Config,
        strategy: Strategy,
        state: RunState,
        model: keras.Model,
        reader: Reader,
        callbacks: list[keras.callbacks.Callback] | None,
        *,
        facts: report.Facts,
        fit: int,
        verbose: str | int | None,
    ):
        """Makes them. With `config.resume`, gives model and state the values of the newest checkpoint.

        Args:
            state: after its `begin_fit`.
            reader: of the training data.
            callbacks: the user's.
            fit: number of this `fit`, from 1; each has a folder of its own.
            verbose: as in `fit`.

        Raises:
            UserError: if a user-defined callback cannot work on several processes, or the run cannot be resumed.
        """
        callbacks = _checked(strategy, config, callbacks)
        processes = strategy.processes
        is_chief = processes.rank == 0
        # The same on all ranks, though some callbacks may be on one alone, as those that write are.
        self._has_callbacks = processes.any_rank(bool(callbacks))
        callbacks = [callback for callback in callbacks if is_chief or not isinstance(callback, WRITERS)]
        verbose = _verbosity(verbose, config)
        self.state, self._strategy, self._trained = state, strategy, model
        folder, checkpoints = config.folder_of_fit(fit), config.checkpoints_of_fit(fit)
        identity = training_state.identity(config, model, reader, strategy.read) if checkpoints else {}
        self.resumed = resume(processes, model, identity, checkpoints) if checkpoints and config.resume else None
        if self.resumed:
            _resume(state, reader, self.resumed.state)
        self.recorder = Recorder(
            state,
            facts,
            strategy,
            folder=folder if is_chief else None,
            saved=self.resumed.state if self.resumed else None,
            verbose=bool(verbose) and is_chief,
        )
        shown = [Progress(state, bar=verbose == 1)] if is_chief and verbose else []
        stateful = [*callbacks, keras.callbacks.History()]
        self.checkpointer = None
        if checkpoints:
            parts = config, strategy, state, model, reader, self.recorder, stateful
            self.checkpointer = Checkpointer(*parts, identity=identity, folder=checkpoints, resumed=self.resumed)
        super().__init__(
            [self.recorder, *shown, *stateful],
            add_history=True,
            model=model,
            epochs=state.epochs,
            steps=state.num_batches,
            verbose=0,
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Gives resumed callbacks their state, after they have reset it themselves."""
        super().on_train_begin(logs)
        if self.checkpointer:
            self.checkpointer.restore_callbacks()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the epoch; a resumed one with the metrics of its first part."""
        self.state.begin_epoch(epoch)
        if self.checkpointer:
            self.checkpointer.begin_epoch()
        super().on_epoch_begin(epoch, logs)
        self._listening = {
            event: [each for each in self.callbacks if _is_listening(each, event)] for event in _BATCH_EVENTS
        }

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Tells of a batch that is to be trained."""
        self._call_listening("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells of a batch that was trained, stops the training where it is to end, writes a checkpoint if it is due.

        With several steps a call, `batch` is the last one of the call.
        """
        if self.state.is_at_last_step:
            self._trained.stop_training = True
        signals.leave_if_asked()
        self._call_listening("on_train_batch_end", batch, logs)
        if self._has_callbacks and self._strategy.processes.num_processes > 1:  # to ask is to wait for the last one
            self._stop_alike()
        self.state.after_batch(is_stopping=self._trained.stop_training)
        if self.checkpointer:
            self.checkpointer.after_step()

    def on_test_begin(self, logs: Any = None) -> None:
        """Ends the training part of the epoch."""
        self._end_training_part()
        if self.checkpointer:
            self.checkpointer.keep_metrics()
        self._gather_for_callbacks()
        super().on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Ends an evaluation: some callbacks change the weights for it, and back."""
        self._gather_for_callbacks()
        super().on_test_end(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells of a batch that was evaluated."""
        self._call_listening("on_test_batch_end", batch, logs)
        if self.checkpointer:
            self.checkpointer.after_test_step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the epoch, with the whole model on each rank if there are callbacks: they may save it."""
        self._gather_for_callbacks()
        self._end_training_part()
        self.state.end_epoch()
        if logs and logs.get("loss", 0) is None:
            logs["loss"] = self.recorder.mean_loss()
        numbers = as_numbers(logs)
        for callback in self.callbacks:  # of one dictionary: what one adds, the next ones and the checkpoint see
            callback.on_epoch_end(epoch, numbers)
        self._stop_alike()
        self._keep_one_rate()
        if self.checkpointer:
            self.checkpointer.after_epoch(report.plain(numbers))

    def _stop_alike(self) -> None:
        """Stops all ranks if a callback stopped one: by the clock, say, since the logs are equal on all."""
        self._trained.stop_training = self._strategy.processes.any_rank(self._trained.stop_training)

    def _keep_one_rate(self) -> None:
        """Gives all ranks the learning rate of rank 0, which a callback may have set."""
        model = self._trained
        if learning_rate_schedule(model.optimizer) is None:
            own_rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
            rate, *_ = self._strategy.processes.all_gather_object(own_rate)
            if rate != own_rate:
                model.optimizer.learning_rate = rate

    def _gather_for_callbacks(self) -> None:
        if self._has_callbacks:
            self._strategy.gather_variables(self._trained)

    def _end_training_part(self) -> None:
        self.recorder.catch_up()  # waits for the last step
        self.state.stop_clock()

    def _call_listening(self, event: str, batch: int, logs: Any) -> None:
        """Converts the logs of a step, which waits for the device, only for callbacks that look at them."""
        for callback in self._listening[event]:  # the user's come last
            logs = logs if isinstance(callback, _CONVERT_THEMSELVES) else as_numbers(logs)
            getattr(callback, event)(batch, logs=logs)

    def close(self) -> None:
        """Closes the files, also of a run that failed."""
        self.recorder.close()
        if self.checkpointer and (missing := self.checkpointer.close()):
            report.warn(f"could not be written: {missing}")


def _is_listening(callback: keras.callbacks.Callback, event: str) -> bool:
    """Returns whether a callback does not leave an event as Keras has it.

    Keras' default one of a training step calls the older `on_batch_end`, as TerminateOnNaN has.
    """
    default = keras.callbacks.Callback
    names = {event, event.replace("train_", "")}
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(default, name) for name in names)


def _verbosity(verbose: str | int | None, config: Config) -> str | int:
    """Returns what `verbose` of `fit` stands for: by default a bar in a terminal, else a line an epoch."""
    verbose = config.verbose if verbose == "auto" else verbose
    return (1 if sys.stdout.isatty() else 2) if verbose is None else verbose


def _resume(state: RunState, reader: Reader, saved: dict[str, Any]) -> None:
    """Continues where a checkpoint was saved."""
    position = Position(saved["epoch"], saved["batch"])
    state.resume(saved["step"], position, was_stopped=saved["stopped"], measured=saved["recorder"])
    reader.resume_at(*position, saved.get("data"))


def _checked(
    strategy: Strategy, config: Config, callbacks: list[keras.callbacks.Callback] | None
) -> list[keras.callbacks.Callback]:
    """Returns the user's callbacks. Raises `UserError` for one that cannot work in this run."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UserError("callbacks: expected a list of callbacks. Received: a CallbackList")
    several = strategy.processes.num_processes > 1
    in_parts = several and (config.strategy == "pipeline" or config.shard != "none")
    for callback in callbacks or ():
        if isinstance(callback, keras.callbacks.BackupAndRestore) and (several or config.keeps_checkpoints):
            raise UserError(
                "BackupAndRestore puts back weights and epoch alone, on one process; leave it out, and use a workdir "
                "and --resume"
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch" and in_parts:
            raise UserError(
                "ModelCheckpoint(save_freq=...) saves within an epoch, when a process knows its own part of the "
                "weights alone (--strategy=pipeline, --shard); use --checkpoint_every"
            )
    return callbacks or []


_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_test_batch_end")
# They convert the logs when they show or write them, if at all.
_CONVERT_THEMSELVES = (Recorder, Progress)
