"""Sweeps as people start them: a table of all runs; stopped anywhere, continued there."""

import csv
import importlib.util
import re
import shutil
import signal

import pytest

from kerasdp.cli.parse import parse_sweep
from kerasdp.errors import UserError
from tests.helpers import BACKENDS, ROOT, run, start

SHORT = ("--device=cpu", "--model=mlp", "--batch_size=256", "--epochs=2", "--max_steps=12")


def rows_in(workdir):
    with open(workdir / "sweep.csv", newline="") as file:
        return [{name: row[name] for name in ("seed", "learning_rate", "loss", "val_loss") if name in row}
                for row in csv.DictReader(file)]  # fmt: skip


def sweep(*flags, backend, **settings):
    return run("recipes/sweep.py", f"--backend={backend}", *SHORT, *flags, backend=backend, **settings)


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[pytest.mark.proof] * (name != "jax")) for name in BACKENDS]
)
def test_a_sweep_that_is_killed_continues(backend, tmp_path):
    """Killed in the second of two runs: the first is not trained again, the second continues at its next step."""
    flags = (f"--backend={backend}", *SHORT, "--sweep=seed=1,2", f"--workdir={tmp_path}/sweep")
    program = start("recipes/sweep.py", *flags, "--checkpoint_every=1", backend=backend)
    for line in program.stdout:
        if line.startswith("run 2 of 2"):
            break
    folder = tmp_path / "sweep" / "seed=2" / "checkpoints"
    while not (folder.is_dir() and any(path.suffix == ".safetensors" for path in folder.iterdir())):
        assert program.poll() is None
    program.send_signal(signal.SIGKILL)
    program.wait(20)
    assert not (tmp_path / "sweep" / "sweep.csv").exists()

    refused = sweep("--sweep=seed=1,2", f"--workdir={tmp_path}/sweep", backend=backend)
    assert refused.returncode == 2 and "holds the runs of an earlier sweep; continue it (--resume)" in refused.stderr
    done = sweep("--sweep=seed=1,2", f"--workdir={tmp_path}/sweep", "--resume", backend=backend)
    assert done.returncode == 0, done.stderr
    assert "run 1 of 2: seed=1: finished before" in done.stdout
    assert re.search(r"^run 2 of 2: seed=2\n(.*\n)*?resumes after step \d+", done.stdout, re.M)
    whole = sweep("--sweep=seed=1,2", f"--workdir={tmp_path}/whole", backend=backend)
    assert whole.returncode == 0, whole.stderr
    assert rows_in(tmp_path / "sweep") == rows_in(tmp_path / "whole") and len(rows_in(tmp_path / "whole")) == 2
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 10_000


@pytest.mark.proof
def test_a_search_picks_the_same_again(tmp_path):
    """With Optuna: as many runs as trials; resumed with more of them, the first are those of before."""
    if importlib.util.find_spec("optuna") is None:
        pytest.skip("optuna is not installed: pip install 'kerasdp[optuna]'")
    name, flags = BACKENDS[-1], ("--sweep=learning_rate=0.001..0.1", f"--workdir={tmp_path}/search")
    first = sweep(*flags, "--trials=2", backend=name)
    assert first.returncode == 0, first.stderr
    before = rows_in(tmp_path / "search")
    assert len(before) == 2 and all(0.001 <= float(row["learning_rate"]) <= 0.1 for row in before)
    more = sweep(*flags, "--trials=4", "--resume", backend=name)
    assert more.returncode == 0 and more.stdout.count("finished before") == 2, more.stdout
    assert rows_in(tmp_path / "search")[:2] == before and len(rows_in(tmp_path / "search")) == 4


@pytest.mark.proof
def test_a_run_that_fails_is_a_line_of_the_table(tmp_path):
    """And the rest is trained; a copy of the recipe in an empty folder does it."""
    for name in ("sweep.py", "train.py"):
        shutil.copy(ROOT / "recipes" / name, tmp_path)
    flags = ("--device=cpu", "--epochs=1", "--max_steps=5", "--sweep=optimizer=adam,sgd(learning_rate=1e30)")
    done = run("sweep.py", *flags, "--workdir=s", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    adam, sgd = (re.search(rf"^{name}.*", done.stdout, re.M)[0] for name in ("adam  ", "sgd"))
    assert "the loss became" in sgd and "the loss became" not in adam
    worse = run("sweep.py", *flags[:3], "--sweep=optimizer=no,none", "--workdir=t", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert worse.returncode == 1 and "no run of the sweep came to its end; the first: --optimizer" in worse.stderr


def test_flags():
    config, space, trials = parse_sweep(
        ["", "--sweep=learning_rate=0.001..0.1; batch_size=8..64;gpus=1,2; model=../a.py:f,mlp", "--trials=3"]
    )
    assert space == {
        "learning_rate": (0.001, 0.1), "batch_size": (8, 64), "num_devices": [1, 2], "model": ["../a.py:f", "mlp"],
    }  # fmt: skip
    assert trials == 3 and config.workdir.startswith("runs/")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "a sweep needs choices to try: add --sweep="),
        (["--sweep=seed=1..9"], "--sweep: the range of seed needs --trials=20"),
        (["--sweep=seed=1,2", "--trials=0"], "--trials: expected a whole number of at least 1. Received: 0"),
        (["--sweep=rate=1,2"], "--sweep: expected flags with values"),
        (["--sweep=batch_size=32..many"], "--sweep: batch_size: "),
        (["--sweep=seed=1,2", "--export=a.keras"], "--export has no effect here: each run of a sweep would write"),
        (["--sweep=seed=1,2", "--workers=2"], "--workers has no effect here: it belongs to recipes/ray_train.py"),
    ],
)
def test_wrong_flags(flags, words):
    with pytest.raises(UserError) as caught:
        parse_sweep(["sweep.py", *flags])
    assert words in str(caught.value) and "\n" not in str(caught.value)
