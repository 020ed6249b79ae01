"""The runs of a sweep, each with a folder of its own, and what they leave together."""

import dataclasses
import itertools
import os
from typing import Any

from kerasdp.config import HANG_TIMEOUT, Config
from kerasdp.errors import UserError
from kerasdp.reporting.comparison import Run, best_of, draw, read_history, rows_of, table, write_csv

# What a sweep itself decides.
_NOT_SWEPT = (
    "workdir", "checkpoint_dir", "resume", "max_restarts", "export", "hosts", "host_rank", "coordinator", "dry_run",
)  # fmt: skip
_NEVER = 1e9  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Run):
    """One run of a sweep.

    Args:
        settings: all choices of the run.
    """

    settings: Config


def trials_of(settings: Config, workdir: str, grid: dict[str, list[Any]]) -> list[Trial]:
    """Returns a trial for each combination of the values of a grid.

    Raises:
        UserError: if there is nothing to combine, or a value cannot be used.
    """
    require_choices(grid)
    return [trial_of(settings, workdir, dict(zip(grid, values))) for values in itertools.product(*grid.values())]


def require_choices(values: dict[str, Any]) -> None:
    """Raises `UserError` if there is nothing to choose from, or a name is that of no choice of a run."""
    if not values:
        raise UserError("a sweep needs choices to try: add --sweep='learning_rate=0.01,0.1; batch_size=32,64'")
    known = {field.name for field in dataclasses.fields(Config)} - set(_NOT_SWEPT)
    for name, tried in values.items():
        if name not in known or not tried:
            raise UserError(
                f"a sweep needs choices of a run, each with values, as learning_rate=0.01,0.1. Received: {name}"
            )


def trial_of(settings: Config, workdir: str, choices: dict[str, Any]) -> Trial:
    """Returns the trial of these choices, in a folder that they name.

    Raises:
        UserError: if one of them cannot be used.
    """
    folder = ",".join(f"{name}={value}" for name, value in choices.items()).replace(os.sep, "_")
    places: dict[str, Any] = {"workdir": os.path.join(workdir, folder)}
    if settings.checkpoint_dir is not None:
        places["checkpoint_dir"] = os.path.join(settings.checkpoint_dir, folder)
    return Trial(
        name=", ".join(f"{name}={value}" for name, value in choices.items()),
        folder=places["workdir"],
        choices=choices,
        settings=dataclasses.replace(settings, **choices, **places),
    )


def in_own_process(settings: Config) -> Config:
    """Returns the choices with a limit for hanging, whereby `launch` starts a process."""
    timeout = HANG_TIMEOUT if settings.hang_timeout is None else settings.hang_timeout or _NEVER
    return dataclasses.replace(settings, hang_timeout=timeout)


def finished(trial: Trial, error: str = "") -> Trial:
    """Returns the trial with what its last `fit` left in its folder, and with what went wrong."""
    folders = (str(trial.settings.folder_of_fit(number)) for number in itertools.count(1))
    *_, last = [trial.folder, *itertools.takewhile(os.path.isdir, folders)]
    return dataclasses.replace(trial, history=read_history(last), error=error)


def write_results(trials: list[Trial], workdir: str) -> None:
    """Prints the table, and writes it and the picture into the workdir."""
    rows = rows_of(list(trials))
    for row in rows:
        del row["run"]  # its choices are
    write_csv(rows, os.path.join(workdir, "sweep.csv"))
    print(table(rows))
    if best := best_of(list(trials)):
        print(f"best: {best.name}; files in {best.folder}")
    draw(list(trials), os.path.join(workdir, "sweep.png"))
    print(f"sweep.csv and sweep.png in {workdir}", flush=True)
