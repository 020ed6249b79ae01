"""recipes/sweep.py: stopped anywhere, a sweep continues there; a run that fails is a line."""

import json
import re
import shutil
import signal

import pytest

from tests.helpers import ROOT, run, start

pytestmark = pytest.mark.proof
optuna = pytest.importorskip("optuna")

SHORT = ("--device=cpu", "--model=mlp", "--epochs=2", "--max_steps=12", "--trials=2")
# Twelve steps take as many milliseconds: the run would be over when it is killed.
LONGER = ("--epochs=20", "--max_steps=400", "--checkpoint_every=1")


def study_in(workdir):
    journal = optuna.storages.journal
    storage = journal.JournalStorage(journal.JournalFileBackend(str(workdir / "optuna.journal")))
    return optuna.load_study(study_name="sweep", storage=storage)


def test_a_sweep_that_is_killed_continues(backend, tmp_path):
    """Killed in the second of two runs: the first is not trained again, the second continues at its next step."""
    workdir = tmp_path / "sweep"
    flags = (f"--backend={backend}", *SHORT, *LONGER, f"--workdir={workdir}")
    program = start("recipes/sweep.py", *flags, backend=backend)
    folder = workdir / "run-001" / "checkpoints"
    while not list(folder.glob("step-*.safetensors")):
        assert program.poll() is None
    program.send_signal(signal.SIGKILL)
    program.wait(20)
    refused = run("recipes/sweep.py", *flags, backend=backend)
    assert refused.returncode == 2 and "exists already; continue it (--resume)" in refused.stderr
    done = run("recipes/sweep.py", *flags, "--resume", backend=backend)
    assert done.returncode == 0, done.stderr
    assert "run 1 of 2" not in done.stdout
    assert re.search(r"^run 2 of 2: .*\n(.*\n)*?resumes after step \d+", done.stdout, re.M)
    first, stopped, second = study_in(workdir).trials
    assert [trial.state.name for trial in (first, stopped, second)] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert (stopped.params, stopped.user_attrs) == (second.params, second.user_attrs)
    final = json.loads((workdir / "run-001" / "report.json").read_text())["final"]
    assert second.value == final["val_loss"] and len(list(workdir.glob("run-*"))) == 2


def test_a_run_that_fails_is_a_line(tmp_path):
    """And the rest is trained; by a copy of the recipe in an empty folder, which searches something else."""
    text = (ROOT / "recipes" / "sweep.py").read_text()
    begin, end = text.index("    FLAGS.learning_rate ="), text.index("def main(")
    choice = '    FLAGS.optimizer = trial.suggest_categorical("optimizer", ["adam", "sgd(learning_rate=1e30)"])\n\n\n'
    (tmp_path / "sweep.py").write_text(text[:begin] + choice + text[end:])
    shutil.copy(ROOT / "recipes" / "train.py", tmp_path)
    done = run("sweep.py", *SHORT[:-1], "--trials=6", "--workdir=s", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "failed: the loss became" in done.stdout and "best: {'optimizer': 'adam'}" in done.stdout
    assert {trial.state.name for trial in study_in(tmp_path / "s").trials} == {"COMPLETE", "FAIL"}
