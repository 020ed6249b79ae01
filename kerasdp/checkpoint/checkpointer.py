"""Decides when a checkpoint of a `fit` is written, and resumes from one."""

import contextlib
import dataclasses
import math
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras

from kerasdp.checkpoint import files
from kerasdp.checkpoint import state as training_state
from kerasdp.checkpoint.files import Checkpoint, require
from kerasdp.config import Config, versions
from kerasdp.errors import CheckpointError, PreemptedError, UserError, way_to_resume
from kerasdp.keras_compat.models import set_monitor_direction
from kerasdp.processes import signals
from kerasdp.processes.ranks import Processes
from kerasdp.reporting import report
from kerasdp.reporting.recorder import Recorder
from kerasdp.run_state import Position, RunState

# The fields that the state in a checkpoint must have.
_NEEDED = ("epoch", "batch", "stopped", "best", "identity", "recorder", "callbacks", "saved_by")
# What a rank requests; the maximum over the ranks is what happens.
_NOTHING, _SAVE, _END = range(3)


def newest(processes: Processes, folder: str) -> tuple[str, Checkpoint] | None:
    """Returns path and content of the newest checkpoint of a folder, on all ranks; None if there is none.

    It is the one that rank 0 finds to be valid. What is newer and cannot be used stays where it is.

    Raises:
        UserError: if none of several can be used, or a rank does not find the one of rank 0.
    """
    found = files.load_newest(folder, report.warn) if processes.rank == 0 else None
    path, *_ = processes.all_gather_object(None if found is None else found[0])
    if processes.num_processes == 1:
        return found
    if processes.rank and path:
        with contextlib.suppress(CheckpointError, OSError):
            found = path, files.load(path)
    own = "none" if found is None else files.checksum_of(found[1])
    if processes.rank and not path and files.paths_in(folder):
        own = "others"
    of_all = processes.all_gather_object((own, socket.gethostname()))
    for rank, (theirs, machine) in enumerate(of_all):
        if theirs != of_all[0][0]:
            raise UserError(
                f"--resume: {path or folder} is {'missing' if theirs == 'none' else 'another one'} on {machine} (rank "
                f"{rank}), as rank 0 sees it on {of_all[0][1]}; every machine reads it: put --workdir where all see "
                "it, or copy it to each"
            )
    return found


def resume(
    processes: Processes, model: keras.Model, identity: dict[str, Any], found: tuple[str, Checkpoint]
) -> Checkpoint:
    """Gives a model and its optimizer the values of the checkpoint that `newest` found; returns it.

    Raises:
        UserError: if it is the checkpoint of another run.
        CheckpointError: if it lacks something.
    """
    path, saved = found
    require(path, saved.state, *_NEEDED)
    if processes.rank == 0:  # which alone holds the first row of a batch
        training_state.check_identity(saved.state["identity"], identity)
    without = training_state.frozen(model) if training_state.FROZEN in identity else {}
    training_state.restore(model, saved.arrays, ("model", "optimizer", "loss_scale", "optimizers"), without)
    return saved


@dataclasses.dataclass(kw_only=True, eq=False)
class Checkpointer:
    """Writes a checkpoint when one is due, and when a signal asks the run to end.

    Not a callback: it saves what the callbacks left, so it is called after all of them. Each rank has one, but only
    rank 0 writes: the state is the same on all.

    Args:
        stateful: the callbacks whose state is saved.
        read: see `kerasdp.step.contract.Strategy.read`.
        data_state: returns, in JSON, what the data needs to continue with a batch of an epoch.
        resumed: the checkpoint from which the run resumes, or None.
    """

    config: Config
    run_state: RunState
    recorder: Recorder
    model: keras.Model
    stateful: list[keras.callbacks.Callback]
    processes: Processes
    num_devices: int
    read: training_state.Read
    data_state: Callable[[int, int], Any]
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
        is_chief = self.processes.rank == 0
        self._architecture = training_state.architecture_of(self.model) if is_chief else None
        self.writer = files.Writer(self.folder, self.config.keep, report.warn) if is_chief else None
        if self.writer and self.resumed:
            self.writer.last_good = files.path_of(self.folder, self.resumed.state["step"])

    def restore_callbacks(self) -> None:
        """Gives the callbacks their saved state. Call after their `on_train_begin`, in which they reset it."""
        for callback in self.stateful:
            set_monitor_direction(callback)
        for known, callback in zip(self._begin, self.stateful):
            after = training_state.plain_attributes(callback)
            for name in [name for name in known if after.get(name) != known[name]]:
                del known[name]
        if self.resumed:
            states = self.resumed.state["callbacks"]
            left = training_state.restore_callbacks(self.stateful, states, self.resumed.arrays, self.model)
            if left and self.writer:
                report.warn(f"--resume: not restored: {', '.join(left)}; what this run has there stays")
        self._unsaved = [training_state.unsaved_attributes(callback) for callback in self.stateful]

    def begin_epoch(self) -> None:
        """Gives the metrics the values of a resumed epoch's first part, which Keras has just reset."""
        self._train_metrics = {}
        if self.resumed and self.resumed.state["batch"]:
            training_state.restore(self.model, self.resumed.arrays, ("metrics",))
        self.resumed = None

    def after_step(self) -> None:
        """Writes a checkpoint if one is due; ends the run if a signal has come."""
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
        """Keeps the training metrics. Call before an evaluation, which resets them."""
        known = training_state.variables_of(self.model, ("metrics",))
        values: Iterable[Any] = map(training_state.to_numpy, known.values())
        if self.config.shard != "none":
            values = self.read(self.model, list(known.values()), training_state.to_numpy)
        self._train_metrics = dict(zip(known, values))

    def after_test_step(self) -> None:
        """Ends the run if a signal has come; a resumed one starts with the validation."""
        if self.processes.all_reduce_max_delayed(self._request()) == _END:
            self._end(self.run_state.position)

    def after_epoch(self, logs: dict[str, Any]) -> None:
        """Writes a checkpoint, unless the epoch was cut short: then that of its last step counts."""
        if not self.run_state.is_epoch_cut:
            self._save(Position(self.run_state.epoch + 1, 0), is_best=self._is_best(logs), wait=True)
        if self.processes.any_rank(signals.noted() is not None):
            self._end(None)

    def _request(self) -> int:
        """Returns what this rank requests of all."""
        if signals.noted() is not None:
            return _END
        if self.every_seconds and self.writer and time.monotonic() - self._last_time > self.every_seconds:
            self._last_time = time.monotonic()
            return _SAVE
        return _NOTHING

    def _is_best(self, logs: dict[str, Any]) -> bool:
        """Returns whether the model is the best so far, by validation loss, else by training loss."""
        name = "val_loss" if "val_loss" in logs else "loss"
        score, known = logs.get(name), self.best or {"name": "loss", "score": math.inf}
        if not isinstance(score, float) or not math.isfinite(score):
            return False
        if name == known["name"] and score >= known["score"] or name == "loss" and known["name"] == "val_loss":
            return False
        self.best = {"name": name, "score": score}
        return True

    def close(self) -> str | None:
        """Waits for what is being written; returns which checkpoint is missing, and why, on rank 0, if one is."""
        if self.writer is None:
            return None
        self.writer.close()
        return self.writer.unwritten

    @property
    def last_good(self) -> str | None:
        """Returns the newest checkpoint that was written, on rank 0."""
        return self.writer.last_good if self.writer else None

    def _save(self, position: Position, *, is_best: bool = False, wait: bool = False) -> None:
        """Saves a checkpoint to resume at `position`. If one is still being written, waits or does nothing."""
        step = self.run_state.step
        is_known = step == self._last_saved and not is_best and position.batch
        is_written = self.writer is not None and not is_known and (wait or not self.writer.is_busy)
        if is_written:
            self.recorder.catch_up()  # raises if a loss is not a number
        variables = {}
        if is_written or self._reads_together:
            without, known = self._left_out(), training_state.variables_of(self.model)
            variables = {name: variable for name, variable in known.items() if name not in without}
        values = self.read(self.model, list(variables.values()), training_state.to_numpy if is_written else None)
        if self.writer is None or not is_written:
            return
        arrays = dict(zip(variables, values, strict=True)) | self._train_metrics
        self._warn_of_unsaved()
        is_stopped = self.model.stop_training and not position.batch and not self.run_state.is_at_last_step
        state = {
            "step": step,
            "epoch": position.epoch,
            "batch": position.batch,
            "data": self.data_state(position.epoch, position.batch),
            "stopped": is_stopped,
            "best": self.best,
            "identity": self.identity,
            "recorder": self.recorder.saved_state(),
            "callbacks": training_state.callback_states(self.stateful, self._begin, arrays, self.model),
            "saved_by": {
                "backend": self.config.backend,
                "devices": self.num_devices,
                "precision": self.config.precision,
            },
            "config": self.config.as_dict(),
            "architecture": self._architecture,
            "versions": versions(),
        }
        self.writer.write(Checkpoint(arrays=arrays, state=state), is_best)
        self._last_saved = step

    @property
    def _reads_together(self) -> bool:
        """Returns whether each rank holds some of what a checkpoint takes."""
        return self.config.shard != "none" or self.config.strategy != "data"

    def _left_out(self) -> dict[str, Any]:
        """Returns the weights of the model that checkpoints of this run leave out, by name: none by default.

        Raises:
            UserError: if they are not what they were when the training began: a resumed run would lose that.
        """
        if self.config.checkpoint_weights == "all":
            return {}
        read = self.read if self._reads_together else None
        if training_state.digest_of_frozen(self.model, read) != self.identity[training_state.FROZEN]:
            raise UserError(
                f"--checkpoint_weights=trained: frozen weights of {self.model.name}, which no checkpoint holds, have "
                "changed, or others were frozen, since the training began; leave it out"
            )
        return training_state.frozen(self.model)

    def _warn_of_unsaved(self) -> None:
        """Names attributes of callbacks that changed and are in no checkpoint, each once."""
        changed = [
            f"{type(callback).__name__}.{name}"
            for callback, before in zip(self.stateful, self._unsaved)
            for name, value in training_state.unsaved_attributes(callback).items()
            if before.get(name) != value
        ]
        new = [name for name in dict.fromkeys(changed) if name not in self._warned]
        if new:
            self._warned.update(new)
            report.warn(
                f"no checkpoint holds {', '.join(new)}, which changed: of a callback, numbers, text, arrays, and "
                "lists, dictionaries, tuples and sets of such are saved"
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
        saved = f"saved in {path}" if is_saved else "which could not be saved"
        way = way_to_resume(self.config.workdir, self.config.checkpoint_dir)
        raise PreemptedError(f"stopped by {name} after step {step}, {saved}; resume with {way}")
