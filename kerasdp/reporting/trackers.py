"""Tells experiment trackers of a run: TensorBoard's event files, Weights & Biases, MLflow."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from kerasdp.errors import UserError, redacted
from kerasdp.reporting.report import Facts, warn

_PROJECT = "kerasdp"


class Tracker(Protocol):
    """A place that keeps numbers of a run."""

    def add(self, kind: str, number: int, values: dict[str, float]) -> None:
        """Adds numbers of a step or an epoch.

        Args:
            kind: `"step"` or `"epoch"`.
            number: its number, from 1.
            values: by name.
        """

    def close(self) -> None:
        """Ends the run."""


def open_trackers(facts: Facts, folder: str, last_step: int) -> "Trackers":
    """Returns what `Config.tracker` asks for.

    Args:
        facts: of the run.
        folder: of the files of the run.
        last_step: from which a run resumes; 0 for a new one.

    Raises:
        UserError: if one cannot begin: nobody is logged in, its server does not answer.
    """
    made = {}
    for name in facts.config.trackers:
        try:
            made[name] = _MAKERS[name](facts, folder, last_step)
        except Exception as error:
            raise UserError(f"--tracker={name} cannot begin: {_first_line(error)}") from error
    return Trackers(made)


class Trackers:
    """Several trackers. One that fails is left out from then on: training does not need it."""

    def __init__(self, trackers: dict[str, Tracker]):
        self._trackers = trackers

    def add(self, kind: str, number: int, values: dict[str, float]) -> None:
        """Adds numbers to all; as `Tracker.add`."""
        self._of_each(lambda tracker: tracker.add(kind, number, values))

    def close(self) -> None:
        """Ends all."""
        self._of_each(lambda tracker: tracker.close())

    def _of_each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a server that is away, a full disk
                del self._trackers[name]
                warn(f"--tracker={name} has failed ({_first_line(error)}); training continues without it")


class _TensorBoard:
    """Event files in the folder `tensorboard`."""

    def __init__(self, facts: Facts, folder: str, last_step: int):
        from tensorboardX import SummaryWriter  # writes event files without TensorFlow

        self._folder = os.path.join(folder, "tensorboard")
        self._events = SummaryWriter(self._folder, purge_step=last_step + 1 if last_step else None)

    def add(self, kind: str, number: int, values: dict[str, float]) -> None:
        self._check()
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, number)

    def close(self) -> None:
        self._check()
        self._events.close()

    def _check(self) -> None:
        # The library writes in a thread, which a full disk ends; then its queue fills, and its users wait for ever.
        # tensorboardX has no public name for that thread.
        if not self._events.file_writer.event_writer._worker.is_alive():
            raise OSError(f"cannot write into {self._folder}")


class _WeightsAndBiases:
    """A run of Weights & Biases, in the project kerasdp unless $WANDB_PROJECT names another; $WANDB_MODE=offline."""

    def __init__(self, facts: Facts, folder: str, last_step: int):
        import wandb

        known = _saved(folder, "wandb", last_step)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=facts.title,
            dir=folder,
            config=facts.config.as_dict(),
            id=known,
            resume="allow",
            settings=wandb.Settings(silent=True),
        )
        _save(folder, "wandb", self._run.id)
        for kind in ("step", "epoch"):
            self._run.define_metric(f"{kind}/*", step_metric=kind)

    def add(self, kind: str, number: int, values: dict[str, float]) -> None:
        self._run.log({kind: number} | {f"{kind}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, in the experiment kerasdp, where $MLFLOW_TRACKING_URI says, else where MLflow keeps its runs."""

    def __init__(self, facts: Facts, folder: str, last_step: int):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(_PROJECT)
        experiment = known.experiment_id if known else self._client.create_experiment(_PROJECT)
        self._run = _saved(folder, "mlflow", last_step)
        if self._run is None:
            self._run = self._client.create_run(experiment, run_name=facts.title).info.run_id
            settings = facts.config.as_dict().items()
            self._client.log_batch(self._run, params=[Param(name, str(value)) for name, value in settings])
        _save(folder, "mlflow", self._run)

    def add(self, kind: str, number: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(f"{kind}/{name}", value, now, number) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


_MAKERS: dict[str, Callable[[Facts, str, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}


def _first_line(error: Exception) -> str:
    return redacted(str(error).partition("\n")[0]) or type(error).__name__


def _saved(folder: str, tracker: str, last_step: int) -> str | None:
    """Returns the id under which a tracker knows the run that is resumed; None for a new run."""
    if last_step:
        return _known(folder).get(tracker)
    return None


def _save(folder: str, tracker: str, run_id: str) -> None:
    known = _known(folder)
    with open(os.path.join(folder, "trackers.json"), "w") as file:
        json.dump(known | {tracker: run_id}, file)


def _known(folder: str) -> dict[str, str]:
    """Returns the ids of the run, by tracker."""
    found: Any = None
    unreadable = contextlib.suppress(OSError, ValueError, RecursionError)
    with unreadable, open(os.path.join(folder, "trackers.json")) as file:
        found = json.load(file)
    items = found.items() if isinstance(found, dict) else ()
    return {name: run_id for name, run_id in items if isinstance(run_id, str)}
