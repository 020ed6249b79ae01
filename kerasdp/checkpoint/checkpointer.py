"""Writes checkpoints during `fit`, and resumes a run from a checkpoint."""

import dataclasses
import math
import socket
import time
from typing import Any

import keras

from kerasdp.checkpoint import files
from kerasdp.checkpoint import state as training_state
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.config import Config, versions
from kerasdp.contract import Strategy
from kerasdp.data.batch import Reader
from kerasdp.errors import PreemptedError, UserError, way_to_resume
from kerasdp.keras_compat.models import set_monitor_direction
from kerasdp.processes import signals
from kerasdp.processes.ranks import Processes
from kerasdp.reporting import report
from kerasdp.reporting.recorder import Recorder
from kerasdp.run_state import Position, RunState

# What a rank requests; the maximum over the ranks is what happens.
_NOTHING, _SAVE, _END = range(3)


def resume(processes: Processes, model: keras.Model, identity: dict[str, Any], folder: str) -> Checkpoint | None:
    """Loads the newest checkpoint of a folder into a model and its optimizer.

    Returns:
        The checkpoint; None if the folder has no checkpoint.

    Raises:
        UserError: if no checkpoint in the folder can be loaded; if the ranks find different checkpoints; if the
            checkpoint belongs to another run.
    """
    found = files.load_newest(folder, report.warn if processes.rank == 0 else lambda text: None)
    own = socket.gethostname(), found and found[1].checksum
    (first, expected), *others = processes.all_gather_object(own)
    for machine, checksum in others:
        if checksum != expected:
            raise UserError(
                f"--resume: the newest checkpoint in {folder} differs between {first} and {machine}; put --workdir on "
                "a shared file system, or copy the same checkpoints to each machine"
            )
    if found is None:
        return None
    _, saved = found
    if processes.rank == 0:  # which alone holds the first row of a batch
        training_state.check_identity(saved.state["identity"], identity)
    without = training_state.frozen(model) if training_state.FROZEN in identity else {}
    training_state.restore(model, saved.arrays, ("model", "optimizer", "loss_scale", "optimizers"), without)
    return saved


@dataclasses.dataclass(eq=False)
class Checkpointer:
    """Writes checkpoints at a fixed interval, after each epoch, and when a signal stops the run.

    A checkpoint contains the state of the callbacks. So a `Checkpointer` is called after all callbacks, and is not a
    callback. Each rank has a `Checkpointer`. Only rank 0 writes files, because the state is the same on all ranks.

    Args:
        reader: reader of the training data.
        stateful: callbacks whose state is saved.
        identity: facts that must be the same when the run resumes.
        folder: folder or URL of the checkpoints.
        resumed: checkpoint from which the run resumes. None: the run starts from the beginning.
    """

    config: Config
    strategy: Strategy
    run_state: RunState
    model: keras.Model
    reader: Reader
    recorder: Recorder
    stateful: list[keras.callbacks.Callback]
    identity: dict[str, Any]
    folder: str
    resumed: Checkpoint | None

    def __post_init__(self) -> None:
        self.every_steps, self.every_seconds = self.config.checkpoint_interval()
        self.best = self.resumed.state["best"] if self.resumed else None
        self._begin = [training_state.plain_attributes(callback) for callback in self.stateful]
        self._unsaved: list[dict[str, str]] = [{} for _ in self.stateful]
        self._warned: set[str] = set()
        self._last_time = time.monotonic()
        self._last_saved, self._last_step = -1, self.run_state.step
        self._train_metrics: dict[str, Any] = {}
        self.processes = self.strategy.processes
        is_chief = self.processes.rank == 0
        self._architecture = training_state.architecture_of(self.model) if is_chief else None
        self.writer = files.Writer(self.folder, self.config.keep, report.warn) if is_chief else None
        if self.writer and self.resumed:
            self.writer.last_good = files.path_of(self.folder, self.resumed.state["step"])

    def restore_callbacks(self) -> None:
        """Restores the saved state of the callbacks.

        Call this method after `on_train_begin`, because many callbacks reset their state in `on_train_begin`.
        """
        for callback in self.stateful:
            set_monitor_direction(callback)
        # Without the attributes that it has set: they are always saved.
        self._begin = [
            dict(known.items() & training_state.plain_attributes(callback).items())
            for known, callback in zip(self._begin, self.stateful)
        ]
        if self.resumed:
            saved = self.resumed
            training_state.restore_callbacks(self.stateful, saved.state["callbacks"], saved.arrays, self.model)
        self._unsaved = [training_state.unsaved_attributes(callback) for callback in self.stateful]

    def begin_epoch(self) -> None:
        """Restores the saved metrics if the run resumes in the middle of an epoch.

        Call this method at the start of an epoch, after Keras has reset the metrics.
        """
        self._train_metrics = {}
        if self.resumed and self.resumed.state["batch"]:
            training_state.restore(self.model, self.resumed.arrays, ("metrics",))
        self.resumed = None

    def after_step(self) -> None:
        """Writes a checkpoint if the checkpoint interval has passed. Ends the run if a signal has arrived.

        Call this method after each training step.
        """
        step = self.run_state.step
        # A call may train several steps: of these the last one counts.
        is_due = self.every_steps and step // self.every_steps > self._last_step // self.every_steps
        self._last_step = step
        request = self.processes.all_reduce_max_delayed(self._request())
        if request == _END:
            self._end(self.run_state.position)
        if self.run_state.is_epoch_cut:
            self._save(self.run_state.position, wait=True)
        elif request == _SAVE or is_due:
            self._save(self.run_state.position)

    def keep_metrics(self) -> None:
        """Stores the values of the training metrics. Call this method before an evaluation, which resets them."""
        known = training_state.variables_of(self.model, ("metrics",))
        values = self.strategy.read(self.model, list(known.values()), training_state.to_numpy)
        self._train_metrics = dict(zip(known, values))

    def after_test_step(self) -> None:
        """Ends the run if a signal has arrived during a validation. A resumed run starts with this validation."""
        if self.processes.all_reduce_max_delayed(self._request()) == _END:
            self._end(self.run_state.position)

    def after_epoch(self, logs: dict[str, Any]) -> None:
        """Writes a checkpoint at the end of an epoch, and ends the run if a signal has arrived.

        If the epoch ended early, the method writes no checkpoint, because the last step has already written one.
        """
        if not self.run_state.is_epoch_cut:
            self._save(Position(self.run_state.epoch + 1, 0), is_best=self._is_best(logs), wait=True)
        if self.processes.any_rank(signals.noted() is not None):
            self._end(None)

    def _request(self) -> int:
        """Returns the request of this rank: `_END`, `_SAVE` or `_NOTHING`."""
        if signals.noted() is not None:
            return _END
        if self.every_seconds and self.writer and time.monotonic() - self._last_time > self.every_seconds:
            self._last_time = time.monotonic()
            return _SAVE
        return _NOTHING

    def _is_best(self, logs: dict[str, Any]) -> bool:
        """Returns whether the validation loss, or without a validation the training loss, is the lowest so far."""
        name = "val_loss" if "val_loss" in logs else "loss"
        score = logs.get(name)
        if not isinstance(score, float) or not math.isfinite(score):
            return False
        if self.best and (name == "loss", score) >= (self.best["name"] == "loss", self.best["score"]):
            return False
        self.best = {"name": name, "score": score}
        return True

    def close(self) -> str | None:
        """Waits until the current checkpoint is written.

        Returns:
            On rank 0, a text that names a checkpoint that could not be written, and the reason. None on other ranks, or
                if no checkpoint is missing.
        """
        if self.writer is None:
            return None
        self.writer.close()
        return self.writer.unwritten

    @property
    def last_good(self) -> str | None:
        """Returns the path of the newest complete checkpoint on rank 0; None on all other ranks."""
        return self.writer.last_good if self.writer else None

    def _save(self, position: Position, *, is_best: bool = False, wait: bool = False) -> None:
        """Saves a checkpoint from which a run resumes at `position`.

        Args:
            position: epoch and batch at which a resumed run continues.
            is_best: whether to save the checkpoint as the best one, too.
            wait: whether to wait for a write that is in progress. False: no checkpoint is saved during another write.
        """
        step = self.run_state.step
        is_known = step == self._last_saved and not is_best and position.batch
        is_written = self.writer is not None and not is_known and (wait or not self.writer.is_busy)
        # If the model is sharded, all ranks take part in reading it.
        if not is_written and self.config.shard == "none" and self.config.strategy == "data":
            return
        if is_written:
            self.recorder.catch_up()  # raises if a loss is not a number
        without, known = self._left_out(), training_state.variables_of(self.model)
        variables = {name: variable for name, variable in known.items() if name not in without}
        take = training_state.to_numpy if is_written else None
        values = self.strategy.read(self.model, list(variables.values()), take)
        if self.writer is None or not is_written:
            return
        arrays = dict(zip(variables, values, strict=True)) | self._train_metrics
        self._warn_of_unsaved()
        is_stopped = self.model.stop_training and not position.batch and not self.run_state.is_at_last_step
        state = {
            "step": step,
            "epoch": position.epoch,
            "batch": position.batch,
            "data": self.reader.saved_state(position.epoch, position.batch),
            "stopped": is_stopped,
            "best": self.best,
            "identity": self.identity,
            "recorder": self.recorder.saved_state(),
            "callbacks": training_state.callback_states(self.stateful, self._begin, arrays, self.model),
            "saved_by": {"backend": self.config.backend, "devices": self.recorder.facts.num_devices},
            "config": self.config.as_dict(),
            "architecture": self._architecture,
            "versions": versions(),
        }
        self.writer.write(Checkpoint(arrays=arrays, state=state), is_best)
        self._last_saved = step

    def _left_out(self) -> dict[str, Any]:
        """Returns the model weights that checkpoints do not contain, by name. By default the result is empty.

        Raises:
            UserError: if these weights have changed since training began, because a resumed run would lose the change.
        """
        if self.config.checkpoint_weights == "all":
            return {}
        if training_state.digest_of_frozen(self.model, self.strategy.read) != self.identity[training_state.FROZEN]:
            raise UserError(
                f"--checkpoint_weights=trained: checkpoints leave out frozen weights of {self.model.name}, but these "
                "weights, or the choice of frozen weights, changed during training; use --checkpoint_weights=all"
            )
        return training_state.frozen(self.model)

    def _warn_of_unsaved(self) -> None:
        """Warns once about each callback attribute that changed and cannot be saved."""
        changed = [
            f"{type(callback).__name__}.{name}"
            for callback, before in zip(self.stateful, self._unsaved)
            for name, value in training_state.unsaved_attributes(callback).items()
            if before.get(name) != value
        ]
        new = sorted(set(changed) - self._warned)
        if new:
            self._warned.update(new)
            report.warn(
                f"checkpoints do not contain {', '.join(new)}, which changed during training; store the state of a "
                "callback in numbers, text, arrays, or lists, dictionaries, tuples and sets of these types"
            )

    def _end(self, position: Position | None) -> None:
        if position is not None:
            self._save(position, wait=True)
        if self.writer:
            self.writer.wait()
        step = self.run_state.step
        path = files.path_of(self.folder, step)
        # Not before rank 0 has written: a rank that leaves ends the others.
        is_saved, *_ = self.processes.all_gather_object(self.last_good == path)
        signal = signals.noted()
        if signal is signals.INTERRUPT:
            raise KeyboardInterrupt
        name = "a signal to another process" if signal is None else signal.name
        saved = f"saved in {path}" if is_saved else "but the checkpoint of this step could not be written"
        way = way_to_resume(self.config.workdir, self.config.checkpoint_dir)
        raise PreemptedError(f"stopped by {name} after step {step}, {saved}; resume with {way}")
