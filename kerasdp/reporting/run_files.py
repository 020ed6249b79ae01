"""Writes the files of a run into the workdir, and logs the values of the run to experiment trackers."""

import contextlib
import csv
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.config import versions
from kerasdp.errors import UserError
from kerasdp.processes.error_text import first_line
from kerasdp.reporting.report import Facts, warn

BACKEND_COLOURS = {"torch": "#e4572e", "jax": "#4c78a8", "tensorflow": "#f2a541"}


class RunFiles:
    """Writes the files of a run into the workdir. Replaces the files of an earlier run.

    The training continues if a file cannot be written, for example because the disk is full.

    Attributes:
        history: the rows of history.csv.
    """

    def __init__(self, workdir: str, facts: Facts, *, last_step: int = 0, history: list[dict[str, Any]] | None = None):
        """Creates the files, or continues the files of a resumed run.

        Args:
            workdir: folder for the files.
            facts: description of the run.
            last_step: step from which the run resumes; 0 in a new run.
            history: rows of history.csv before the resume point.
        """
        self.workdir = workdir
        self.history = list(history or [])
        self._reported: set[str] = set()
        self._title = facts.title
        os.makedirs(workdir, exist_ok=True)
        for name in ("report.json", "history.csv", "curves.png"):  # an earlier result must not stay if the run fails
            with self._tolerated(name), contextlib.suppress(FileNotFoundError):
                os.remove(self._path(name))
        self._write_json("config.json", facts.choices | {"versions": versions()})
        with self._tolerated("steps.jsonl"):
            path = self._path("steps.jsonl")
            with open(f"{path}.tmp", "w") as file:
                file.writelines(_lines_until(last_step, path))
            os.replace(f"{path}.tmp", path)  # a run that is killed here loses nothing
        self._trackers = Trackers(facts, workdir, last_step)
        if self.history:
            self._write_history()

    def add_step(self, step: int, epoch: int, loss: float, learning_rate: float, images_per_second: float) -> None:
        """Adds a line to steps.jsonl.

        `step` counts from 1, `epoch` from 0. In the file, epochs count from 1.
        """
        numbers = {"loss": loss, "learning_rate": learning_rate, "images_per_second": images_per_second}
        # Opened each time, because another program may have removed the file.
        with self._tolerated("steps.jsonl"), open(self._path("steps.jsonl"), "a") as file:
            file.write(json.dumps({"step": step, "epoch": epoch + 1} | numbers) + "\n")
        self._trackers.add("step", step, numbers)

    def add_epoch(self, epoch: int, logs: dict[str, float], seconds: float, images_per_second: float) -> None:
        """Adds a row to history.csv."""
        self.history.append({"epoch": epoch + 1, **logs, "seconds": seconds, "images_per_second": images_per_second})
        self._write_history()
        self._trackers.add("epoch", epoch + 1, logs)

    def _write_history(self) -> None:
        # Rewritten each time, because validation_freq may add a column in a later epoch.
        names = list(dict.fromkeys(name for row in self.history for name in row))
        with self._tolerated("history.csv"), open(self._path("history.csv"), "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.history)

    def add_result(self, result: dict[str, Any]) -> None:
        """Writes report.json."""
        self._write_json("report.json", result)

    def close(self) -> None:
        """Draws the curves and closes the trackers."""
        with self._tolerated("curves.png"):
            draw_curves(self.history, self._path("curves.png"), self._title)
        self._trackers.close()

    def _path(self, name: str) -> str:
        return os.path.join(self.workdir, name)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        with self._tolerated(name), open(self._path(name), "w") as file:
            json.dump(content, file, indent=2)
            file.write("\n")

    @contextlib.contextmanager
    def _tolerated(self, name: str) -> Iterator[None]:
        """Catches `OSError`s while a file is written, so that the training continues. Warns once for each file."""
        try:
            yield
        except OSError as error:
            if name not in self._reported:
                self._reported.add(name)
                warn(f"cannot write {self._path(name)} ({error.strerror or error}); training continues")


def _lines_until(last_step: int, path: str) -> list[str]:
    """Returns the lines of steps.jsonl up to a step.

    Skips lines that cannot be parsed, because a killed run may leave an incomplete line.
    """
    kept = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                if json.loads(line)["step"] <= last_step:
                    kept.append(line.decode().rstrip("\n") + "\n")
    return kept


def make_figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, grid: str = "both"
) -> tuple[Any, list[Any]]:
    """Makes an empty Matplotlib figure.

    Does not use pyplot, so the figure does not affect the user's plots and display.

    Args:
        width: width in inches.
        height: height in inches.
        rows: number of rows of axes. The axes of a column share their x axis.
        columns: number of columns of axes.
        grid: direction of the grid lines: `"x"`, `"y"` or `"both"`.

    Returns:
        The `matplotlib.figure.Figure`, and the `matplotlib.axes.Axes` of each cell, row by row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex="col").flat)
    for each in axes:
        each.grid(alpha=0.25, axis=grid)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw_curves(history: list[dict[str, Any]], path: str, title: str) -> None:
    """Draws loss and accuracy by epoch.

    Args:
        history: a dictionary for each epoch, as in history.csv.
        path: path of the PNG file.
        title: title of the picture.
    """
    from matplotlib.ticker import MaxNLocator

    names = [name for name in ("loss", "accuracy") if any(name in row for row in history)]
    if not names:
        return
    figure, all_axes = make_figure(5.2 * len(names), 3.6, columns=len(names))
    for axes, name in zip(all_axes, names):
        for key, label, colour in ((name, "training", "#4c78a8"), (f"val_{name}", "validation", "#f58518")):
            points = [(row["epoch"], row[key]) for row in history if isinstance(row.get(key), float)]
            if points:
                axes.plot(*zip(*points), marker="o", markersize=4, color=colour, label=label)
        axes.set(xlabel="epoch", title=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120, format="png")


# Two functions of a tracker: one logs the values of a step or an epoch, the other ends the run.
_Tracker = tuple[Callable[[str, int, dict[str, float]], None], Callable[[], None]]


class Trackers:
    """Logs values to the experiment trackers that `Config.tracker` names.

    If a tracker fails during the training, the training continues without this tracker.
    """

    def __init__(self, facts: Facts, folder: str, last_step: int):
        """Starts all trackers.

        Args:
            facts: description of the run.
            folder: folder with the files of the run.
            last_step: step from which the run resumes; 0 for a new run.

        Raises:
            UserError: if a tracker cannot start, for example without a login or a connection to its server.
        """
        self._trackers: dict[str, _Tracker] = {}
        path, known = os.path.join(folder, "trackers.json"), {}
        if last_step and os.path.exists(path):  # the ids of the run in the trackers
            with open(path) as file:
                known = json.load(file)
        for name in facts.config.trackers:
            try:
                self._trackers[name], known[name] = _BEGIN[name](facts, folder, last_step, known.get(name))
            except Exception as error:
                raise UserError(f"--tracker={name} cannot start ({first_line(error)}); fix the cause") from error
        if known:
            with open(path, "w") as file:
                json.dump(known, file)

    def add(self, kind: str, number: int, values: dict[str, float]) -> None:
        """Logs values of a step or an epoch to all trackers.

        Args:
            kind: `"step"` or `"epoch"`.
            number: number of the step or epoch, from 1.
            values: values by name.
        """
        self._of_each(lambda add, _: add(kind, number, values))

    def close(self) -> None:
        """Ends the run in all trackers."""
        self._of_each(lambda _, close: close())

    def _of_each(self, call: Callable[..., None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(*tracker)
            except Exception as error:  # the server is not reachable or the disk is full, for example
                del self._trackers[name]
                warn(f"--tracker={name} has failed ({first_line(error)}); training continues without it")


# The callback of W&B (0.31) needs TensorFlow. The callback of MLflow (3.18) needs `fit`, not a custom loop.
_PROJECT = "kerasdp"


def _tensorboard(facts: Facts, folder: str, last_step: int, _: str | None) -> tuple[_Tracker, str]:
    """Starts to write TensorBoard event files into the folder `tensorboard`. Does not need TensorFlow."""
    from tensorboardX import SummaryWriter

    path = os.path.join(folder, "tensorboard")
    events = SummaryWriter(path, purge_step=last_step + 1 if last_step else None)

    def add(kind: str, number: int, values: dict[str, float]) -> None:
        # The library writes in a thread. A full disk ends it; then its queue fills, and callers wait forever.
        # tensorboardX has no public name for that thread.
        if not events.file_writer.event_writer._worker.is_alive():
            raise OSError(f"cannot write into {path}")
        for name, value in values.items():
            events.add_scalar(f"{kind}/{name}", value, number)

    def close() -> None:
        add("", 0, {})
        events.close()

    return (add, close), ""


def _wandb(facts: Facts, folder: str, _: int, known: str | None) -> tuple[_Tracker, str]:
    """Starts a Weights & Biases run, in the project $WANDB_PROJECT, or in `kerasdp` if that variable is not set."""
    import wandb

    place = {"project": os.environ.get("WANDB_PROJECT", _PROJECT), "dir": folder, "id": known, "resume": "allow"}
    run = wandb.init(**place, name=facts.title, config=facts.choices, settings=wandb.Settings(silent=True))
    for kind in ("step", "epoch"):
        run.define_metric(f"{kind}/*", step_metric=kind)

    def add(kind: str, number: int, values: dict[str, float]) -> None:
        run.log({kind: number} | {f"{kind}/{name}": value for name, value in values.items()})

    return (add, run.finish), run.id


def _mlflow(facts: Facts, _: str, __: int, known: str | None) -> tuple[_Tracker, str]:
    """Starts an MLflow run in the experiment `kerasdp`, at the address in $MLFLOW_TRACKING_URI."""
    import mlflow
    from mlflow.entities import Param

    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(_PROJECT)
    experiment = found.experiment_id if found else client.create_experiment(_PROJECT)
    run = known or client.create_run(experiment, run_name=facts.title).info.run_id
    if not known:
        client.log_batch(run, params=[Param(name, str(value)) for name, value in facts.choices.items()])

    def add(kind: str, number: int, values: dict[str, float]) -> None:
        mlflow.log_metrics({f"{kind}/{name}": value for name, value in values.items()}, step=number, run_id=run)

    return (add, functools.partial(client.set_terminated, run)), run


_BEGIN: dict[str, Callable[[Facts, str, int, str | None], tuple[_Tracker, str]]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow
}  # fmt: skip
