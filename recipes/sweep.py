"""Searches hyperparameters of recipes/train.py with Optuna.

    pip install 'kerasdp[optuna]'
    python recipes/sweep.py --trials=20 --epochs=3 --workdir=runs/sweep
    python recipes/sweep.py --trials=30 --epochs=3 --workdir=runs/sweep --resume         # continues, with more
    python recipes/sweep.py --help

Expected of the first command: a line for each run, and the best with a validation loss below 0.2.

`choose` has the values to search. To search other values, edit it in a copy of this file and recipes/train.py. Optuna
picks values that minimize the last validation loss. Each run has a separate process, and a folder in the workdir.
The study is in optuna.journal in the workdir.

With --resume a sweep continues where it stopped, also in the middle of a run. Finished runs are not trained again. If
a run fails, the sweep prints the error and continues.
"""

import json
import os
from typing import Any

import train  # recipes/train.py: its function and flags
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("trials", 20, "Number of runs. Optuna picks their hyperparameters.", lower_bound=1)
flags.adopt_module_key_flags(train)


def choose(trial: Any) -> None:
    """Sets each searched flag to the value that Optuna suggests for a trial."""
    FLAGS.learning_rate = trial.suggest_float("learning_rate", 0.003, 0.1, log=True)
    FLAGS.batch_size = trial.suggest_categorical("batch_size", [32, 64, 128])


def main(argv):
    """Runs the trials one after the other. Each trial calls `train.train`."""
    given = kerasdp.flags.values(argv)
    if "checkpoint_dir" in given:
        raise kerasdp.UserError("--checkpoint_dir: a sweep writes checkpoints to --workdir; leave out --checkpoint_dir")
    workdir = given["workdir"]
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
        from optuna.trial import TrialState
    except ImportError as error:
        raise kerasdp.UserError("a sweep needs Optuna, which is missing: pip install 'kerasdp[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    os.makedirs(workdir, exist_ok=True)
    path = os.path.join(workdir, "optuna.journal")
    if os.path.exists(path) and not FLAGS.resume:
        raise kerasdp.UserError(f"--workdir: {path} exists already; continue it (--resume), or choose another folder")
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(path)), study_name="sweep", load_if_exists=True
    )
    for stopped in study.get_trials(states=[TrialState.RUNNING]):  # a new trial resumes its run
        study.tell(stopped.number, state=TrialState.PRUNED)
        study.enqueue_trial(stopped.params, user_attrs=stopped.user_attrs)
    for number in range(len(study.get_trials(states=[TrialState.COMPLETE, TrialState.FAIL])), FLAGS.trials):
        study.sampler = optuna.samplers.TPESampler(seed=(FLAGS.seed or 0) + number)  # new values after --resume
        trial = study.ask()
        folder = trial.user_attrs.get("workdir") or os.path.join(workdir, f"run-{trial.number:03}")
        trial.set_user_attr("workdir", folder)
        # With hang_timeout each run has a new process. With resume it starts at step 0 if it has no checkpoint.
        own = {"workdir": folder, "resume": True, "hang_timeout": FLAGS.hang_timeout or 600.0}
        choose(trial)
        print(f"run {number + 1} of {FLAGS.trials}: {trial.params}", flush=True)
        try:
            kerasdp.launch(train.train, **kerasdp.flags.values(argv) | own)
            with open(os.path.join(folder, "report.json")) as file:
                final = json.load(file)["final"]
            study.tell(trial, final.get("val_loss", final["loss"]))
        except kerasdp.RunError as error:
            if error.exit_code == 99:  # stopped by a signal
                raise
            print(f"failed: {error}", flush=True)
            study.tell(trial, state=TrialState.FAIL)
    if not study.get_trials(states=[TrialState.COMPLETE]):
        raise kerasdp.RunError("no run of the sweep has finished; the messages above say why")
    best = study.best_trial
    print(f"best: {best.params}, validation loss {best.value:.4f}; files in {best.user_attrs['workdir']}")


if __name__ == "__main__":
    app.run(main)
