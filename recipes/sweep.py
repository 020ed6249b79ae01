"""Trains many runs whose choices Optuna picks, one after the other, for the lowest last validation loss.

    pip install 'kerasdp[optuna]'
    python recipes/sweep.py --trials=20 --epochs=3 --workdir=runs/sweep
    python recipes/sweep.py --trials=30 --epochs=3 --workdir=runs/sweep --resume         # continues, with more
    python recipes/sweep.py --help

What is searched is in `choose`; all else are flags. Each run has a process, and a folder in the workdir. The study is
kept there, too, in optuna.journal: with --resume a sweep continues where it was stopped, in the middle of a run; what
is finished is not trained again. A run that fails is a line, and the others are trained.

Expected of the first sweep: a line for each run, and the best with a validation loss below 0.2.

Copy this file and recipes/train.py into your project and change what you like.
"""

import dataclasses
import json
import os
from typing import Any

from train import train  # recipes/train.py: the same function

import kerasdp


def choose(trial: Any) -> dict[str, Any]:
    """Returns what is searched: fields of `kerasdp.Config`."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 0.003, 0.1, log=True),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128]),
    }


def main(config: kerasdp.Config, trials: int) -> None:
    """Runs on this machine; `train` runs in the workers."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
        from optuna.trial import TrialState
    except ImportError as error:
        raise kerasdp.UserError("a sweep needs Optuna, which is missing: pip install 'kerasdp[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.makedirs(config.workdir, exist_ok=True)
    path = os.path.join(config.workdir, "optuna.journal")
    if os.path.exists(path) and not config.resume:
        raise kerasdp.UserError(f"--workdir: {path} is there already; continue it (--resume), or choose another folder")
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(path)), study_name="sweep", load_if_exists=True
    )
    for stopped in study.get_trials(states=[TrialState.RUNNING]):  # its run is continued as another trial
        study.tell(stopped.number, state=TrialState.PRUNED)
        study.enqueue_trial(stopped.params, user_attrs=stopped.user_attrs)
    for number in range(len(study.get_trials(states=[TrialState.COMPLETE, TrialState.FAIL])), trials):
        study.sampler = optuna.samplers.TPESampler(seed=config.seed + number)  # other values than before --resume
        trial = study.ask()
        folder = trial.user_attrs.get("workdir") or os.path.join(config.workdir, f"run-{trial.number:03}")
        trial.set_user_attr("workdir", folder)
        # With a limit for hanging each run has its process. Without a checkpoint it begins.
        own = {"workdir": folder, "resume": True, "hang_timeout": config.hang_timeout or 600.0}
        settings = dataclasses.replace(config, **choose(trial), **own)
        print(f"run {number + 1} of {trials}: {trial.params}", flush=True)
        try:
            kerasdp.launch(train, settings)
            with open(os.path.join(folder, "report.json")) as file:
                final = json.load(file)["final"]
            study.tell(trial, final.get("val_loss", final["loss"]))
        except kerasdp.RunError as error:
            if error.exit_code == 99:  # a signal asked the run to end
                raise
            print(f"failed: {error}", flush=True)
            study.tell(trial, state=TrialState.FAIL)
    if not study.get_trials(states=[TrialState.COMPLETE]):
        raise kerasdp.RunError("no run of the sweep came to its end")
    best = study.best_trial
    print(f"best: {best.params}, validation loss {best.value:.4f}; files in {best.user_attrs['workdir']}")


if __name__ == "__main__":
    kerasdp.main(main, flags="sweep")
