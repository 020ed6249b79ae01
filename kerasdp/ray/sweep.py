"""Trains many runs at a time on a Ray cluster, which differ in some choices."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from kerasdp.config import Config, prepared_workdir
from kerasdp.errors import UserError
from kerasdp.ray.workers import at_home, connected, described, of_worker, outcome, resources
from kerasdp.runtime.sending import sent
from kerasdp.sweep.trials import Trial, finished, trials_of, write_results

_ERROR = "error"


def sweep(
    train: Callable[..., Any],
    settings: Config | None = None,
    grid: dict[str, list[Any]] | None = None,
    *,
    cpus_per_run: float | None = None,
    **changes: Any,
) -> list[Trial]:
    """Runs `train(runner)` with each combination of some choices, as many at a time as the Ray cluster has room for.

    Each run has a folder of its own in the workdir, from whose last checkpoint it restarts when its process or node is
    lost, `max_restarts` times; with `resume` the whole sweep continues where it stopped. Prints a table of all runs,
    and leaves it as `sweep.csv`, and the curves of all as `sweep.png`, in the workdir.

    Args:
        train: as for `kerasdp.launch`.
        settings: the choices that all runs share. `workdir` must be given.
        grid: values of fields of `kerasdp.Config`, by name: `{"learning_rate": [0.01, 0.1], "batch_size": [32, 64]}`.
        cpus_per_run: cores that Ray sets aside for each. None: one for each device.
        **changes: fields of `kerasdp.Config` that replace those of `settings`.

    Returns:
        The runs, in the order of the grid.

    Raises:
        UserError: if the choices cannot be had.
    """
    settings = at_home(dataclasses.replace(settings or Config(), **changes))
    workdir = settings.workdir
    if workdir is None:
        raise UserError("a sweep needs a folder for its runs, but none is set: add --workdir=FOLDER")
    runs = trials_of(settings, workdir, grid or {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(prepared_workdir(workdir, settings.resume))
        for run in runs:
            stack.enter_context(prepared_workdir(run.settings.workdir, settings.resume))
        stack.enter_context(connected())
        told = {"train": stack.enter_context(sent(train, to_other_machines=True))} | described()
        found = _tuned(told, runs, cpus_per_run, settings.max_restarts, workdir)
    runs = [finished(run, error) for run, error in zip(runs, found)]
    write_results(runs, workdir)
    return runs


def _tuned(told: dict[str, Any], runs: list[Trial], cpus: float | None, max_failures: int, workdir: str) -> list[str]:
    """Trains all runs; returns for each what went wrong, empty if nothing did."""
    from ray import tune

    each = [of_worker(run.settings) for run in runs]

    def trial(choice: dict[str, Any]) -> None:
        run, settings = runs[choice["run"]], each[choice["run"]]
        returned = outcome(told, settings, lambda metrics: tune.report(metrics | run.choices))
        if "error" in returned:  # which no restart would help
            tune.report({_ERROR: returned["error"][1]})

    tuner = tune.Tuner(
        tune.with_resources(trial, resources(each[0], cpus)),
        param_space={"run": tune.grid_search(list(range(len(runs))))},
        run_config=tune.RunConfig(
            name="ray", storage_path=workdir, failure_config=tune.FailureConfig(max_failures=max_failures)
        ),
    )
    found = {result.config["run"]: result for result in tuner.fit()}
    return [
        (found[number].metrics or {}).get(_ERROR) or _last_error(found[number].error) for number in range(len(runs))
    ]


def _last_error(error: Any) -> str:
    lines = [line for line in str(error or "").splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line]
    return (told or lines or [""])[-1].strip()
