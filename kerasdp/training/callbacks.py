"""Calls the callbacks of one `fit`, including built-in callbacks, and synchronizes the ranks."""

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

# Callbacks that write files. Only one process runs them, or the processes would overwrite each other's files.
WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


class RunCallbacks(keras.callbacks.CallbackList):
    """Calls the user-defined and built-in callbacks of one `fit`.

    After a batch or an epoch, it first calls the callbacks. Then it agrees with the other ranks whether to stop. Last,
    it writes a checkpoint if one is due. So the checkpoint contains the changes of all callbacks, in any order.

    Attributes:
        recorder: the recorder of the run.
        checkpointer: object that writes checkpoints; None if the run writes no checkpoints.
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
        """Makes the built-in callbacks. If `config.resume` is set, restores the newest checkpoint.

        Args:
            config: configuration of the run.
            strategy: strategy of the run.
            state: state of the run, after `begin_fit`.
            model: the model to train.
            reader: reader of the training data.
            callbacks: user-defined callbacks.
            facts: description of the run, for the files of the run.
            fit: number of this `fit`, from 1. Each `fit` writes to a different folder.
            verbose: verbosity, as in `keras.Model.fit`.

        Raises:
            UserError: if a user-defined callback cannot work on several processes, or the run cannot be resumed.
        """
        callbacks = _checked(strategy, config, callbacks)
        processes = strategy.processes
        is_chief = processes.rank == 0
        # The same on all ranks, though callbacks that write files exist on one rank only.
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
        """Calls the callbacks. In a resumed run, then restores the saved state of the callbacks."""
        super().on_train_begin(logs)
        if self.checkpointer:
            self.checkpointer.restore_callbacks()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the epoch. In a resumed epoch, restores the metrics from the checkpoint."""
        self.state.begin_epoch(epoch)
        if self.checkpointer:
            self.checkpointer.begin_epoch()
        super().on_epoch_begin(epoch, logs)
        self._listening = {
            event: [each for each in self.callbacks if _is_listening(each, event)] for event in _BATCH_EVENTS
        }

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Calls the callbacks before a training batch."""
        self._call_listening("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the callbacks after a training batch.

        Also stops the training after its last step, and writes a checkpoint if a checkpoint is due. If one call runs
        several steps, `batch` is the index of the last step in the call.
        """
        if self.state.is_at_last_step:
            self._trained.stop_training = True
        signals.leave_if_asked()
        self._call_listening("on_train_batch_end", batch, logs)
        if self._has_callbacks and self._strategy.processes.num_processes > 1:  # this waits for the slowest rank
            self._stop_alike()
        self.state.after_batch(is_stopping=self._trained.stop_training)
        if self.checkpointer:
            self.checkpointer.after_step()

    def on_test_begin(self, logs: Any = None) -> None:
        """Waits for the last training step, stops the clock, and calls the callbacks before an evaluation."""
        self._end_training_part()
        if self.checkpointer:
            self.checkpointer.keep_metrics()
        self._gather_for_callbacks()
        super().on_test_begin(logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Gathers the weights, and calls the callbacks after an evaluation.

        Some callbacks replace the weights before an evaluation, and restore the weights in this event.
        """
        self._gather_for_callbacks()
        super().on_test_end(logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Calls the callbacks after an evaluated batch."""
        self._call_listening("on_test_batch_end", batch, logs)
        if self.checkpointer:
            self.checkpointer.after_test_step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the epoch, calls the callbacks, and writes a checkpoint if a checkpoint is due.

        If there are callbacks, each rank first gathers the whole model, because a callback may save the model.
        """
        self._gather_for_callbacks()
        self._end_training_part()
        self.state.end_epoch()
        if logs and logs.get("loss", 0) is None:
            logs["loss"] = self.recorder.mean_loss()
        numbers = as_numbers(logs)
        for callback in self.callbacks:  # one dictionary: later callbacks and the checkpoint see added values
            callback.on_epoch_end(epoch, numbers)
        self._stop_alike()
        self._keep_one_rate()
        if self.checkpointer:
            self.checkpointer.after_epoch(report.plain(numbers))

    def _stop_alike(self) -> None:
        """Stops all ranks if a callback stopped one rank.

        All ranks have the same logs. So the ranks can disagree only if a callback depends on another value, such as the
        time.
        """
        self._trained.stop_training = self._strategy.processes.any_rank(self._trained.stop_training)

    def _keep_one_rate(self) -> None:
        """Sets the learning rate of rank 0 on all ranks. A callback may have changed the rate on only one rank."""
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
        """Calls the callbacks that override a batch event.

        Converts the logs to floats only if a callback needs floats, because the conversion waits for the device.
        """
        for callback in self._listening[event]:  # user-defined callbacks come last
            logs = logs if isinstance(callback, _CONVERT_THEMSELVES) else as_numbers(logs)
            getattr(callback, event)(batch, logs=logs)

    def close(self) -> None:
        """Closes the files. A failed run calls this method, too."""
        self.recorder.close()
        if self.checkpointer and (missing := self.checkpointer.close()):
            report.warn(f"could not write {missing}")


def _is_listening(callback: keras.callbacks.Callback, event: str) -> bool:
    """Returns whether a callback overrides an event.

    Checks two names of the event. The default `on_train_batch_end` of Keras calls the older method `on_batch_end`,
    which some callbacks override, such as `TerminateOnNaN`.
    """
    default = keras.callbacks.Callback
    names = {event, event.replace("train_", "")}
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(default, name) for name in names)


def _verbosity(verbose: str | int | None, config: Config) -> str | int:
    """Returns the value of `verbose` to use.

    The default is 1 (a progress bar) in a terminal, otherwise 2 (one line for each epoch).
    """
    verbose = config.verbose if verbose == "auto" else verbose
    return (1 if sys.stdout.isatty() else 2) if verbose is None else verbose


def _resume(state: RunState, reader: Reader, saved: dict[str, Any]) -> None:
    """Moves the state and the reader to the position that a checkpoint contains."""
    position = Position(saved["epoch"], saved["batch"])
    state.resume(saved["step"], position, was_stopped=saved["stopped"], measured=saved["recorder"])
    reader.resume_at(*position, saved.get("data"))


def _checked(
    strategy: Strategy, config: Config, callbacks: list[keras.callbacks.Callback] | None
) -> list[keras.callbacks.Callback]:
    """Returns the user-defined callbacks after checking them.

    Raises:
        UserError: for a callback that cannot work in this run.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UserError("callbacks: expected a list of callbacks. Received: a CallbackList; pass a list")
    several = strategy.processes.num_processes > 1
    in_parts = several and (config.strategy == "pipeline" or config.shard != "none")
    for callback in callbacks or ():
        if isinstance(callback, keras.callbacks.BackupAndRestore) and (several or config.keeps_checkpoints):
            raise UserError(
                "BackupAndRestore restores only weights and epoch, and only on one process; remove it, and use "
                "--workdir and --resume"
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch" and in_parts:
            raise UserError(
                "ModelCheckpoint(save_freq=...) cannot save within an epoch with --strategy=pipeline or --shard: "
                "each process then holds only a shard of the weights; use --checkpoint_every"
            )
    return callbacks or []


_BATCH_EVENTS = ("on_train_batch_begin", "on_train_batch_end", "on_test_batch_end")
# Callbacks that convert the logs themselves, only when they show or write them.
_CONVERT_THEMSELVES = (Recorder, Progress)
