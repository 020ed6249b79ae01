"""Shows the runs of a sweep: a table, and a picture of their curves."""

import csv
import dataclasses
import itertools
import os
from typing import Any

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.reporting.figure import make_figure

# What a sweep itself decides.
_NOT_SWEPT = ("workdir", "checkpoint_dir", "resume", "max_restarts", "export", "hosts", "host_rank", "coordinator")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep.

    Args:
        choices: the fields of `kerasdp.Config` in which the runs differ.
        settings: all of its choices.
        history: the rows of its history.csv.
        error: what went wrong; empty if nothing did.
    """

    choices: dict[str, Any]
    settings: Config
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def name(self) -> str:
        """Returns the choices in a line."""
        return ", ".join(f"{name}={value}" for name, value in self.choices.items())


def runs_of(settings: Config, workdir: str, grid: dict[str, list[Any]]) -> list[Run]:
    """Returns a run for each combination of the values of a grid.

    Raises:
        UserError: if there is nothing to combine, or a value cannot be used.
    """
    known = {field.name for field in dataclasses.fields(Config)} - set(_NOT_SWEPT)
    for name, values in grid.items():
        if name not in known or not values:
            raise UserError(
                f"a sweep needs choices of a run, each with values, as learning_rate=0.01,0.1. Received: {name}"
            )
    if not grid:
        raise UserError("a sweep needs choices to try: add --sweep='learning_rate=0.01,0.1; batch_size=32,64'")
    runs = []
    for combination in itertools.product(*grid.values()):
        choices = dict(zip(grid, combination))
        folder = ",".join(f"{name}={value}" for name, value in choices.items()).replace(os.sep, "_")
        places: dict[str, Any] = {"workdir": os.path.join(workdir, folder)}
        if settings.checkpoint_dir is not None:
            places["checkpoint_dir"] = os.path.join(settings.checkpoint_dir, folder)
        runs.append(Run(choices=choices, settings=dataclasses.replace(settings, **choices, **places)))
    return runs


def write(runs: list[Run], workdir: str) -> None:
    """Prints the table, and writes it and the picture into the workdir."""
    rows = [_row(run) for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(os.path.join(workdir, "sweep.csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows, columns))
    if best := best_of(runs):
        print(f"best: {best.name}; files in {best.settings.workdir}")
    draw(runs, os.path.join(workdir, "sweep.png"))
    print(f"sweep.csv and sweep.png in {workdir}")


def best_of(runs: list[Run]) -> Run | None:
    """Returns the run whose last validation loss (else training loss) is the lowest; None if none has one."""
    done = [run for run in runs if run.history and not run.error]
    return min(done, key=_score, default=None)


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Returns rows as text, in columns."""
    texts = [columns, *([_shown(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(len(text[place]) for text in texts) for place in range(len(columns))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in texts)


def draw(runs: list[Run], path: str) -> None:
    """Draws loss and accuracy of all runs by epoch: of the validation data if there are any, else of the training."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    known = {name for run in runs for row in run.history for name in row}
    names = [f"val_{name}" if f"val_{name}" in known else name for name in ("loss", "accuracy")]
    names = [name for name in names if name in known]
    if not names:
        return
    colours = [colormaps["viridis"](0.9 * number / max(1, len(runs) - 1)) for number in range(len(runs))]  # no yellow
    figure, all_axes = make_figure(5.0 * len(names), 3.6 + 0.2 * -(-len(runs) // 2), columns=len(names))
    for axes, name in zip(all_axes, names):
        for number, run in enumerate(runs):
            points = [(row["epoch"], row[name]) for row in run.history if name in row]
            if points:
                label = run.name if axes is all_axes[0] else None
                axes.plot(*zip(*points), marker="o", markersize=3, color=colours[number], label=label)
        axes.set(
            xlabel="epoch",
            title=name,
            yscale="log" if name.endswith("loss") and _are_positive(runs, name) else "linear",
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _are_positive(runs: list[Run], name: str) -> bool:
    return all(row.get(name, 1.0) > 0 for run in runs for row in run.history)


def _row(run: Run) -> dict[str, Any]:
    last = run.history[-1] if run.history else {}
    kept = {name: value for name, value in last.items() if name not in ("seconds", "images_per_second", "epoch")}
    seconds = sum(row.get("seconds", 0.0) for row in run.history)
    row = {**run.choices, "epochs": len(run.history), **kept, "seconds": seconds, "error": run.error}
    return {name: value for name, value in row.items() if name != "learning_rate" or name in run.choices} | run.choices


def _score(run: Run) -> float:
    last = run.history[-1]
    return float(last.get("val_loss", last.get("loss", float("inf"))))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
