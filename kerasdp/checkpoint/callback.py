"""Keeps the checkpoints of one `fit`, and goes on from one."""

import math
import time
from typing import Any

import keras

from kerasdp.checkpoint import files
from kerasdp.checkpoint import state as training_state
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.errors import PreemptedError
from kerasdp.keras_compat import set_monitor_direction
from kerasdp.reporting import report
from kerasdp.runtime import signals

# What a rank may ask for; the most urgent wish is what happens.
_NOTHING, _SAVE, _END = range(3)


def resume(runner: Any, model: keras.Model, identity: dict[str, Any], folder: str) -> Checkpoint | None:
    """Brings a model and its optimizer to where the newest checkpoint of a folder is; None if there is none.

    All ranks take the one that rank 0 finds to be sound.

    Raises:
        UserError: if it is the checkpoint of another run, or none of several can be used.
    """
    found = files.load_newest(folder, report.warn) if runner.is_chief else None
    (step,) = runner.strategy.processes.broadcast_from_rank0([-1.0 if found is None else found[1].state["step"]])
    if step < 0:
        return None
    path, saved = found or (files.path_of(folder, int(step)), files.load(files.path_of(folder, int(step))))
    if runner.is_chief:  # which alone holds the first row of a batch
        training_state.check_identity(saved.state["identity"], identity)
        files.set_aside(folder, path)
    training_state.restore(model, saved.arrays, ("model", "optimizer", "loss_scale"))
    return saved


class Checkpointer(keras.callbacks.Callback):
    """Writes checkpoints when they are due, and when a signal asks the run to end. The last of a run's callbacks.

    Each rank has one, but only rank 0 writes: the state is the same on all.
    """

    def __init__(
        self,
        runner: Any,
        recorder: Any,
        stateful: list[keras.callbacks.Callback],
        *,
        identity: dict[str, Any],
        folder: str,
        resumed: Checkpoint | None,
    ):
        """`stateful` are the callbacks whose state is saved."""
        super().__init__()
        self.runner, self.recorder, self.stateful, self.identity = runner, recorder, stateful, identity
        self.every_steps, self.every_seconds = runner.config.checkpoint_interval()
        self.folder = folder
        self.best = resumed.state["best"] if resumed else None
        self._resumed = resumed
        self._begin = [training_state.plain_attributes(callback) for callback in stateful]
        self._last_time = time.monotonic()
        self._last_step = -1
        self._last_told = recorder.step
        self._train_metrics: dict[str, Any] = {}
        self.is_cut = False
        self.writer = files.Writer(folder, runner.config.keep, report.warn) if runner.is_chief else None
        if self.writer and resumed:
            self.writer.last_good = files.path_of(folder, resumed.state["step"])

    def on_train_begin(self, logs: Any = None) -> None:
        """Gives the callbacks their state, which they have just set anew themselves."""
        for callback in self.stateful:
            set_monitor_direction(callback)
        for known, callback in zip(self._begin, self.stateful):
            after = training_state.plain_attributes(callback)
            for name in [name for name in known if after.get(name) != known[name]]:
                del known[name]
        if self._resumed:
            training_state.restore_callbacks(self.stateful, self._resumed.state["callbacks"], self._resumed.arrays)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Gives the metrics the values of the epoch's first part, which Keras has just set back."""
        self._train_metrics = {}
        self.is_cut = False
        if self._resumed and self._resumed.state["batch"]:
            training_state.restore(self.model, self._resumed.arrays, ("metrics",))
            # All that Keras asks of the batches that are passed over; those of a whole epoch need nothing more.
            self.runner.state.set_skipped_logs(self.model.get_metrics_result())
        self._resumed = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes one if it is due; ends the run if a signal has come."""
        recorder = self.recorder
        # A call may train several steps: of these the last one counts.
        is_due = self.every_steps and recorder.step // self.every_steps > self._last_told // self.every_steps
        self._last_told = recorder.step
        self.is_cut = self.model.stop_training and recorder.num_batches != recorder.feed.num_batches
        place = (recorder.epoch, recorder.num_batches)
        asked = self.runner.strategy.processes.all_reduce_max_delayed(self._asks())
        if asked == _END:
            self._end(place)
        if self.is_cut:
            self._save(*place, wait=True)
        elif asked == _SAVE or is_due:
            self._save(*place)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes one, unless the epoch was cut short: then that of its last step counts."""
        if not self.is_cut:
            self._save(epoch + 1, 0, is_best=self._is_best(report.plain(logs)), wait=True)
        if self.runner.strategy.processes.any_rank(signals.noted() is not None):
            self._end(None)

    def on_test_begin(self, logs: Any = None) -> None:
        """Keeps the training metrics, which Keras is about to set back."""
        self._train_metrics = training_state.gather(self.model, ("metrics",))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends the run if a signal has come; it will go on with the validation."""
        if self.runner.strategy.processes.all_reduce_max_delayed(self._asks()) == _END:
            self._end((self.recorder.epoch, self.recorder.num_batches))

    def _asks(self) -> int:
        """What this rank wants of all."""
        if signals.noted() is not None:
            return _END
        if self.every_seconds and self.writer and time.monotonic() - self._last_time > self.every_seconds:
            self._last_time = time.monotonic()
            return _SAVE
        return _NOTHING

    def _is_best(self, logs: dict[str, Any]) -> bool:
        """By validation loss; by training loss as long as there is none."""
        name = "val_loss" if "val_loss" in logs else "loss"
        score, known = logs.get(name), self.best or {"name": "loss", "score": math.inf}
        if not isinstance(score, float) or not math.isfinite(score):
            return False
        if name == known["name"] and score >= known["score"] or name == "loss" and known["name"] == "val_loss":
            return False
        self.best = {"name": name, "score": score}
        return True

    def close(self) -> None:
        """Waits for what is being written."""
        if self.writer:
            self.writer.close()

    @property
    def last_good(self) -> str | None:
        """The newest checkpoint that was written, on rank 0."""
        return self.writer and self.writer.last_good

    def _save(self, epoch: int, batch: int, *, is_best: bool = False, wait: bool = False) -> None:
        """`epoch` and `batch` are where the run goes on. If one is still being written, it waits or does nothing."""
        self.runner.strategy.gather_variables(
            self._model
        )  # not `model`: with jax, to ask for it brings back all values
        if self.writer is None or (self.writer.is_busy and not wait):
            return
        if self.recorder.step == self._last_step and not is_best and batch:
            return
        self.recorder.catch_up()  # raises if one is not a number
        model = self.model  # with jax, Keras here brings back the values from the running step
        arrays = training_state.gather(model) | self._train_metrics
        config = self.runner.config
        state = {
            "step": self.recorder.step,
            "epoch": epoch,
            "batch": batch,
            "stopped": model.stop_training and not batch and not self.recorder.is_at_last_step,
            "best": self.best,
            "identity": self.identity,
            "recorder": self.recorder.state(),
            "callbacks": training_state.callback_states(self.stateful, self._begin, arrays),
            "saved_by": {
                "backend": config.backend,
                "devices": self.runner.strategy.num_devices,
                "precision": config.precision,
            },
            "config": config.as_dict(),
            "versions": report.versions(),
        }
        self.writer.write(Checkpoint(arrays=arrays, state=state), is_best)
        self._last_step = self.recorder.step

    def _end(self, place: tuple[int, int] | None) -> None:
        if place is not None:
            self._save(*place, wait=True)
        if self.writer:
            self.writer.wait()
        path = files.path_of(self.folder, self.recorder.step)
        # Not before rank 0 has written: a rank that leaves ends the others.
        (is_saved,) = self.runner.strategy.processes.broadcast_from_rank0([float(self.last_good == path)])
        signal = signals.noted()
        name = "a signal to another process" if signal is None else signal.name
        saved = f"saved in {path}" if is_saved else "which could not be saved"
        raise PreemptedError(f"stopped by {name} behind step {self.recorder.step}, {saved}; go on with --resume")
