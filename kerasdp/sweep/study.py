"""Trains many runs that differ in some choices, as the trials of an Optuna study that is kept in a file."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kerasdp.config import Config, locked_workdir, prepared_workdir
from kerasdp.errors import PreemptedError, RunError, UserError
from kerasdp.launch import launch
from kerasdp.reporting.comparison import PLACES, score
from kerasdp.sweep.trials import Trial, finished, in_own_process, require_choices, trial_of, trials_of, write_results

if TYPE_CHECKING:
    import optuna

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
            trial = trial_of(settings, workdir, {name: _picked(asked, name, values) for name, values in space.items()})
            is_over = isinstance(asked, optuna.trial.FrozenTrial)
            print(f"run {number + 1} of {total}: {trial.name}{': finished before' * is_over}", flush=True)
            if trial.name not in done:  # else it was picked again
                reason = asked.user_attrs.get("error", "") if is_over else _error_of(train, trial)
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
    require_choices(space)
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


def _error_of(train: Callable[..., Any], trial: Trial) -> str:
    """Trains what is left of a run; returns what went wrong, empty if nothing did."""
    try:
        launch(train, in_own_process(trial.settings))
    except PreemptedError:
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
