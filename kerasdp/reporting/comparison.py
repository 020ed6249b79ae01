"""Compares runs by the files that they left: a table of what differs, what they reached and how fast, and a picture."""

import csv
import dataclasses
import math
import os
import statistics
from typing import Any

from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from kerasdp.config.config import FAULTS, MACHINES, OUTPUT
from kerasdp.reporting.figure import make_figure
from kerasdp.reporting.report import in_columns

# Choices of where a run is and what it leaves, not of what it learns or how fast.
_GROUPS = (MACHINES, OUTPUT, FAULTS)
PLACES = {name for name, choice in choices_of(Config).items() if choice.group in _GROUPS} - {"hosts"} | {"versions"}
_NOT_METRICS = ("epoch", "seconds", "images_per_second", "learning_rate")
_MOST_IN_LEGEND = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One of several runs.

    Args:
        name: what the table and the picture call it.
        folder: of its files.
        choices: the fields of `kerasdp.Config` in which the runs differ.
        history: the rows of its history.csv, numbers alone.
        error: what went wrong; empty if nothing did.
    """

    name: str
    folder: str
    choices: dict[str, Any]
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    error: str = ""


def read_history(folder: str) -> list[dict[str, float]]:
    """Returns the rows of a run's history.csv, without what is no number; none if it has not got there."""
    try:
        with open(os.path.join(folder, "history.csv"), newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error):
        return []
    return [{str(name): float(str(text)) for name, text in row.items() if _is_number(text)} for row in rows]


def rows_of(runs: list[Run]) -> list[dict[str, Any]]:
    """Returns a row for each run: its name, choices, epochs, last metrics, seconds, images a second, what went wrong.

    The best epoch has the lowest validation loss (else training loss). Seconds are those of all epochs; images a second
    the median without the first epoch, in which steps are compiled.
    """
    rows = []
    for run in runs:
        last = run.history[-1] if run.history else {}
        rates = [row["images_per_second"] for row in run.history if "images_per_second" in row]
        row = {"run": run.name, **run.choices, "epochs": len(run.history)}
        if run.history:
            row["best_epoch"] = round(min(run.history, key=_loss).get("epoch", 0))
        row |= {name: value for name, value in last.items() if name not in _NOT_METRICS}
        row["seconds"] = sum(row.get("seconds", 0.0) for row in run.history)
        if rates:
            row["images_per_second"] = statistics.median(rates[1:] or rates)
        rows.append(row | ({"error": run.error} if run.error else {}))
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as text, in columns; a metric of the training data has none where there is one of other data."""
    names, *lines = _lines(rows)
    kept = [number for number, name in enumerate(names) if f"val_{name}" not in names]
    titles = ["samples/s" if name == "images_per_second" else name for name in names]
    return in_columns([[_shown(line[number]) for number in kept] for line in (titles, *lines)])


def plain_cell(value: Any) -> Any:
    """Returns what a CSV file holds of a value, so that no spreadsheet takes a text for a formula.

    An apostrophe goes before texts that begin like one (https://owasp.org/www-community/attacks/CSV_Injection).
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else value


def write_csv(rows: list[dict[str, Any]], path: str) -> None:
    """Writes rows as a CSV file."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([plain_cell(value) for value in line] for line in _lines(rows))


def best_of(runs: list[Run]) -> Run | None:
    """Returns the run whose last validation loss (else training loss) is the lowest; None if none has one."""
    done = [run for run in runs if run.history and not run.error]
    return min(done, key=score, default=None)


def score(run: Run) -> float:
    """Returns the last validation loss (else training loss) of a run; infinity if it has none, or NaN."""
    return _loss(run.history[-1]) if run.history else math.inf


def _loss(row: dict[str, float]) -> float:
    """Returns the validation loss (else training loss) of a row; infinity if it has none, or NaN."""
    loss = row.get("val_loss", row.get("loss", math.inf))
    return math.inf if math.isnan(loss) else loss


def draw(runs: list[Run], path: str) -> None:
    """Draws loss and accuracy of all runs by epoch: of the validation data if there are any, else of the training.

    Args:
        runs: those of the lowest loss are named in the legend.
        path: of the PNG file; without any history none is written.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    known = {name for run in runs for row in run.history for name in row}
    names = [f"val_{name}" if f"val_{name}" in known else name for name in ("loss", "accuracy")]
    names = [name for name in names if name in known]
    if not names:
        return
    drawn = [run for run in runs if run.history]
    named = sorted(drawn, key=score)[:_MOST_IN_LEGEND]
    columns = 1 if max(len(run.name) for run in named) > 50 else 2
    height = 3.6 + 0.2 * -(-len(named) // columns)
    figure, all_axes = make_figure(5.0 * len(names), height, columns=len(names))
    for axes, name in zip(all_axes, names):
        for number, run in enumerate(drawn):
            points = [(row["epoch"], row[name]) for row in run.history if name in row]
            if points:
                colour = colormaps["viridis"](0.9 * number / max(1, len(drawn) - 1))  # no yellow
                label = run.name if axes is all_axes[0] and run in named else None
                axes.plot(*zip(*points), marker="o", markersize=3, color=colour, label=label)
        is_log = name.endswith("loss") and all(row.get(name, 1.0) > 0 for run in drawn for row in run.history)
        axes.set(xlabel="epoch", title=name, yscale="log" if is_log else "linear")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"the best {len(named)} of {len(drawn)}" if len(named) < len(drawn) else None
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8, title=title)
    figure.savefig(path, dpi=120)


def _lines(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Returns the names of all columns, errors last, and the values of each row in their order."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if name != "error"] + ["error"] * ("error" in names)
    return [columns, *([row.get(name, "") for name in columns] for row in rows)]


def _is_number(text: Any) -> bool:
    try:
        float(text or "")
    except (TypeError, ValueError):  # of a row with more columns than names, a list
        return False
    return True


def _shown(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text)  # what moves a terminal's cursor
