"""Trains many runs that differ in some choices, one after the other, and continues a sweep that was stopped."""

import contextlib
import dataclasses
import json
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.config import Config, prepared_workdir
from kerasdp.errors import PreemptedError, RunError, UserError
from kerasdp.launch import launch
from kerasdp.reporting.comparison import PLACES, score
from kerasdp.sweep.trials import Trial, finished, require_choices, trial_of, trials_of, write_results

_DONE = "finished.json"  # in the folder of a run: with which choices its `train` came to its end


def grid(
    train: Callable[..., Any],
    settings: Config | None = None,
    values: dict[str, list[Any]] | None = None,
    **changes: Any,
) -> list[Trial]:
    """Runs `train(runner)` with each combination of some choices, one after the other.

    Each run has a folder of its own in the workdir. With `resume` the sweep continues where it stopped, a run in its
    middle: what is finished is not trained again. A run that fails is a line in the table, and the next one begins.
    Prints a table of all runs, and leaves it as `sweep.csv`, and the curves of all as `sweep.png`, in the workdir.

    Args:
        train: as for `kerasdp.launch`.
        settings: the choices that all runs share. `workdir` must be given.
        values: of fields of `kerasdp.Config`, by name: `{"learning_rate": [0.01, 0.1], "batch_size": [32, 64]}`.
        **changes: fields of `kerasdp.Config` that replace those of `settings`.

    Returns:
        The runs, in the order of the grid.

    Raises:
        UserError: if the choices cannot be had.
        RunError: if no run came to its end.
        PreemptedError: if a signal asked a run to end; the sweep continues with `resume`.
    """
    settings = dataclasses.replace(settings or Config(), **changes)
    with _folder_of(settings) as workdir:
        trials = trials_of(settings, workdir, values or {})
        done = [_run(train, trial, f"run {number} of {len(trials)}") for number, trial in enumerate(trials, 1)]
        return _ended(done, workdir)


def search(
    train: Callable[..., Any],
    settings: Config | None = None,
    space: dict[str, Any] | None = None,
    *,
    num_trials: int,
    **changes: Any,
) -> list[Trial]:
    """Runs `train(runner)` with choices that Optuna picks, for the lowest last validation loss (else training loss).

    The rest is as in `grid`. Which choices come next depends on the seed of the settings and the losses before: a
    search that is resumed picks the same again, and trains only what is not finished.

    Args:
        train: as for `kerasdp.launch`.
        settings: the choices that all runs share. `workdir` must be given.
        space: for each field a tuple of the least and the most, whole numbers or floats, or a list of values:
            `{"learning_rate": (0.001, 0.1), "batch_size": [32, 64]}`. What is above 0 and spans a factor of ten or more
            is searched by its logarithm.
        num_trials: runs.
        **changes: fields of `kerasdp.Config` that replace those of `settings`.

    Returns:
        The runs, in the order in which they were picked; a choice that was picked again stands there once.

    Raises:
        UserError: if the choices cannot be had, or Optuna is not installed.
        RunError: if no run came to its end.
        PreemptedError: if a signal asked a run to end; the search continues with `resume`.
    """
    try:
        import optuna
    except ImportError as error:
        raise UserError("a search needs Optuna, which is not installed: pip install 'kerasdp[optuna]'") from error
    settings = dataclasses.replace(settings or Config(), **changes)
    with _folder_of(settings) as workdir:
        _check_space(settings, workdir, space := space or {})
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=settings.seed))
        done = dict[str, Trial]()
        for number in range(1, num_trials + 1):
            asked = study.ask()
            choices = {name: _picked(asked, name, values) for name, values in space.items()}
            trial = trial_of(settings, workdir, choices)
            if trial.name not in done:
                done[trial.name] = _run(train, trial, f"run {number} of {num_trials}")
            loss = score(done[trial.name])
            is_known = loss < float("inf") and not done[trial.name].error
            study.tell(asked, loss if is_known else None, None if is_known else optuna.trial.TrialState.FAIL)
        return _ended(list(done.values()), workdir)


def _run(train: Callable[..., Any], trial: Trial, which: str) -> Trial:
    """Trains one run, or what is left of it."""
    path, settings = os.path.join(trial.folder, _DONE), _compared(trial.settings)
    with contextlib.suppress(OSError, ValueError, RecursionError), open(path) as file:
        if json.load(file) == settings:
            print(f"{which}: {trial.name}: finished before", flush=True)
            return finished(trial)
    print(f"{which}: {trial.name}", flush=True)
    try:
        launch(train, trial.settings)
    except PreemptedError:
        raise
    except RunError as error:
        reason = str(error)
    except Exception as error:  # of `train` itself, or memory that is too small for a batch
        traceback.print_exc()
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    else:
        with open(path, "w") as file:
            json.dump(settings, file, indent=2)
        return finished(trial)
    print(f"failed: {reason}", flush=True)
    return finished(trial, reason)


def _compared(settings: Config) -> dict[str, Any]:
    """Returns the choices of a run that decide what it trains."""
    choices = {name: value for name, value in settings.as_dict().items() if name not in PLACES}
    known: dict[str, Any] = json.loads(json.dumps(choices))
    return known


@contextlib.contextmanager
def _folder_of(settings: Config) -> Iterator[str]:
    """Makes the folder of a sweep.

    Raises:
        UserError: if there is none, or it holds another sweep.
    """
    workdir = settings.workdir
    if workdir is None:
        raise UserError("a sweep needs a folder for its runs, but none is set: add --workdir=FOLDER")
    with prepared_workdir(workdir, settings.resume):
        runs = [entry.name for entry in os.scandir(workdir) if os.path.exists(os.path.join(entry, "config.json"))]
        if runs and not settings.resume:
            raise UserError(
                f"--workdir: {workdir!r} holds the runs of an earlier sweep; continue it (--resume), or choose another "
                "folder"
            )
        yield workdir


def _ended(trials: list[Trial], workdir: str) -> list[Trial]:
    write_results(trials, workdir)
    if all(trial.error for trial in trials):
        raise RunError(f"no run of the sweep came to its end; the first: {trials[0].error}")
    return trials


def _check_space(settings: Config, workdir: str, space: dict[str, Any]) -> None:
    """Raises `UserError` for a range that is none, and for values that cannot be used."""
    require_choices(space)
    for name, values in space.items():
        if isinstance(values, tuple) and not (len(values) == 2 and values[0] < values[1]):
            raise UserError(f"a range needs its least and its most, as learning_rate=0.001..0.1. Received: {name}")
        for value in values:
            trial_of(settings, workdir, {name: value})


def _picked(asked: Any, name: str, values: Any) -> Any:
    """Returns the value that Optuna picks for a field; floats with four digits, so that folders have short names."""
    if isinstance(values, list):
        return asked.suggest_categorical(name, values)
    least, most = values
    is_log = least > 0 and most >= 10 * least
    if isinstance(least, int) and isinstance(most, int):
        return asked.suggest_int(name, least, most, log=is_log)
    return min(max(float(f"{asked.suggest_float(name, least, most, log=is_log):.4g}"), least), most)
