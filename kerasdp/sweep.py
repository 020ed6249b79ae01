"""Trains many runs that differ in some choices, as the trials of an Optuna study that is kept in a file."""

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasdp.config import HANG_TIMEOUT, Config, locked_workdir, prepared_workdir
from kerasdp.config.choices import choices_of
from kerasdp.config.config import MACHINES
from kerasdp.errors import PreemptedError, RunError, UserError, way_to_resume
from kerasdp.launch import launch
from kerasdp.reporting.comparison import PLACES, Run, best_of, draw, read_history, rows_of, score, table, write_csv

if TYPE_CHECKING:
    import optuna


__all__ = ["run"]
# What a sweep itself decides, beside the choices of several machines.
_NOT_SWEPT = {"workdir", "checkpoint_dir", "resume", "max_restarts", "export"}
_NEVER = 1e9  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Run):
    """One run of a sweep.

    Args:
        settings: all choices of the run.
    """

    settings: Config


# In the workdir: Optuna's journal, which unlike SQLite may lie on any file system. And the study's name in it.
STUDY_FILE, STUDY = "optuna.journal", "sweep"
# What a run may change when it resumes.
_FREE = (*PLACES, "backend", "device", "num_devices", "precision")


def run(
    train: Callable[..., Any],
    settings: Config | None = None,
    space: dict[str, Any] | None = None,
    *,
    num_trials: int | None = None,
    **changes: Any,
) -> "optuna.Study":
    """Runs `train(runner)` with choices that Optuna picks, for the lowest last validation loss (else training loss).

    Each trial is a run in a process and a folder of its own. The study is kept in the workdir: with `resume` a sweep
    that was stopped continues, in the middle of a trial, and picks what it would have picked. A trial that fails is a
    line in the table. Prints a table of all; leaves it as `sweep.csv`, and the curves as `sweep.png`, in the workdir.

    Args:
        train: as for `kerasdp.launch`.
        settings: the choices that all trials share. `workdir` must be given.
        space: for each field of `kerasdp.Config` a list of values, or a tuple of the least and the most, whole numbers
            or floats: `{"learning_rate": (0.001, 0.1), "batch_size": [32, 64]}`. What is above 0 and spans a factor of
            ten or more is searched by its logarithm.
        num_trials: how many `TPESampler` picks. None: each combination of the values, by `GridSampler`.
        **changes: fields of `kerasdp.Config` that replace those of `settings`.

    Returns:
        The study. `workdir` among the `user_attrs` of a trial is the folder of its run.

    Raises:
        UserError: if the choices cannot be had, or Optuna is not installed.
        RunError: if no trial came to its end.
        PreemptedError: if a signal asked a run to end; the sweep continues with `resume`.
    """
    try:
        import optuna
    except ImportError as error:
        raise UserError("a sweep needs Optuna, which is not installed: pip install 'kerasdp[optuna]'") from error
    settings, space = dataclasses.replace(settings or Config(), **changes), space or {}
    workdir = settings.workdir
    if workdir is None:
        raise UserError("a sweep needs a folder for its runs, but none is set: add --workdir=FOLDER")
    _check_space(settings, space, num_trials)
    grid = [] if num_trials else trials_of(settings, workdir, space)
    total, done = num_trials or len(grid), dict[str, Trial]()
    with prepared_workdir(workdir, settings.resume), locked_workdir(workdir, settings.resume):
        study, storage = _opened(workdir, settings, {"--sweep": str(space), "--trials": bool(num_trials)}, space)
        for number in range(total):
            study.sampler = _sampler(space, settings.seed, None if grid else number)
            asked = _asked(study, storage, number)
            trial = _trial_of(settings, workdir, {name: _picked(asked, name, values) for name, values in space.items()})
            is_over = isinstance(asked, optuna.trial.FrozenTrial)
            print(f"run {number + 1} of {total}: {trial.name}{': finished before' * is_over}", flush=True)
            if trial.name not in done:  # else it was picked again
                reason = asked.user_attrs.get("error", "") if is_over else _error_of(train, trial, settings)
                done[trial.name] = finished(trial, reason)
            if not is_over:
                _report(study, asked, done[trial.name])
        trials = [done[trial.name] for trial in grid] or list(done.values())
        write_results(trials, workdir)
        if all(trial.error for trial in trials):
            raise RunError(f"no run of the sweep came to its end; the first: {trials[0].error}")
        return study


def _check_space(settings: Config, space: dict[str, Any], num_trials: int | None) -> None:
    """Raises `UserError` for a range that is none, and for values that cannot be used."""
    _require_choices(space)
    for name, values in space.items():
        if isinstance(values, tuple) and not (num_trials and len(values) == 2 and values[0] < values[1]):
            raise UserError(
                f"a range needs its least and its most, as 0.001..0.1, and a number of trials. Received: {name}"
            )
        for value in values:
            dataclasses.replace(settings, **{name: value})


def _opened(
    workdir: str, settings: Config, choices: dict[str, Any], space: dict[str, Any]
) -> "tuple[optuna.Study, optuna.storages.BaseStorage]":
    """Returns the study that is kept in a folder, or a new one, and its storage.

    Raises:
        UserError: if it is the study of another sweep, or cannot be read.
    """
    import optuna
    from optuna.storages import journal

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = os.path.join(workdir, STUDY_FILE)
    try:
        storage = journal.JournalStorage(journal.JournalFileBackend(path))
        study = optuna.create_study(storage=storage, study_name=STUDY, load_if_exists=settings.resume)
    except optuna.exceptions.DuplicatedStudyError:
        reason = f"{workdir!r} holds the runs of an earlier sweep; continue it (--resume), or choose another folder"
        raise UserError(f"--workdir: {reason}") from None
    except Exception as error:  # whatever Optuna raises of a file that is damaged, or not its own
        reason = f"expected Optuna's journal in {path}. Received: {error!r:.200}"
        raise UserError(f"--workdir: {reason}; choose another folder") from error
    shared = {name: value for name, value in settings.as_dict().items() if name not in (*_FREE, *space)}
    own = json.loads(json.dumps(choices | shared))
    saved = study.user_attrs.get("choices") or own
    study.set_user_attr("choices", saved)
    for name in own:
        if own[name] != saved.get(name):
            raise UserError(
                f"--resume: this sweep differs from the one in the workdir in {name}: expected {saved.get(name)}. "
                f"Received: {own[name]}; repeat the choices of then, or choose another --workdir"
            )
    return study, storage


def _sampler(space: dict[str, Any], seed: int, number: int | None) -> Any:
    """Returns what picks the values: of trial `number` of a search, or, without a number, of a grid."""
    import optuna

    if number is None:
        return optuna.samplers.GridSampler(space, seed=seed % 2**32)
    # One seed for all would give a search that is resumed the values of its first trials again.
    return optuna.samplers.TPESampler(seed=int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1)[0]))


def _asked(study: "optuna.Study", storage: "optuna.storages.BaseStorage", number: int) -> Any:
    """Returns a trial of the study: as it was kept if it has ended, to be continued if it was stopped, or a new one."""
    import optuna

    known = study.get_trials(deepcopy=False)[number:]
    if known and known[0].state.is_finished():
        return known[0]
    if known and known[0].state == optuna.trial.TrialState.RUNNING:
        study_id = storage.get_study_id_from_name(STUDY)
        return optuna.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))
    return study.ask()


def _picked(asked: Any, name: str, values: Any) -> Any:
    """Returns the value that Optuna picks for a field; floats with four digits, so that folders have short names."""
    if isinstance(values, list):
        return asked.suggest_categorical(name, values)
    least, most = values
    is_log = least > 0 and most >= 10 * least
    if isinstance(least, int) and isinstance(most, int):
        return asked.suggest_int(name, least, most, log=is_log)
    return min(max(float(f"{asked.suggest_float(name, least, most, log=is_log):.4g}"), least), most)


def _error_of(train: Callable[..., Any], trial: Trial, settings: Config) -> str:
    """Trains what is left of a run of the sweep of these settings; returns what went wrong, empty if nothing did."""
    own, of_sweep = (way_to_resume(each.workdir, each.checkpoint_dir) for each in (trial.settings, settings))
    try:
        launch(train, in_own_process(trial.settings))
    except PreemptedError as error:
        raise PreemptedError(str(error).replace(own, of_sweep)) from None
    except KeyboardInterrupt as end:
        end.__notes__ = [note.replace(own, of_sweep) for note in end.__notes__]
        raise
    except RunError as error:
        print(f"failed: {error}", flush=True)
        return str(error)
    return ""


def _report(study: "optuna.Study", asked: "optuna.Trial", trial: Trial) -> None:
    """Reports to the study how a trial ended."""
    from optuna.trial import TrialState

    loss = score(trial)
    asked.set_user_attr("workdir", trial.folder)
    if trial.error:
        asked.set_user_attr("error", trial.error)
    # After the last combination GridSampler (Optuna 5.0) stops `optimize`, which does not run here. The state is kept.
    with contextlib.suppress(RuntimeError):
        if trial.error or loss == float("inf"):
            study.tell(asked, state=TrialState.FAIL)
        else:
            study.tell(asked, loss)


def trials_of(settings: Config, workdir: str, grid: dict[str, list[Any]]) -> list[Trial]:
    """Returns a trial for each combination of the values of a grid.

    Raises:
        UserError: if there is nothing to combine, or a value cannot be used.
    """
    _require_choices(grid)
    return [_trial_of(settings, workdir, dict(zip(grid, values))) for values in itertools.product(*grid.values())]


def _require_choices(values: dict[str, Any]) -> None:
    """Raises `UserError` if there is nothing to choose from, or a name is that of no choice of a run."""
    if not values:
        raise UserError("a sweep needs choices to try: add --sweep='learning_rate=0.01,0.1; batch_size=32,64'")
    known = {name for name, choice in choices_of(Config).items() if choice.group != MACHINES} - _NOT_SWEPT
    for name, tried in values.items():
        if name not in known or not tried:
            raise UserError(
                f"a sweep needs choices of a run, each with values, as learning_rate=0.01,0.1. Received: {name}"
            )


def _trial_of(settings: Config, workdir: str, choices: dict[str, Any]) -> Trial:
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
    """Returns the choices with a limit for hanging, so that `launch` starts a process."""
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
