"""Sweeps as people start them: a table of all runs; stopped anywhere, continued there."""

import csv
import itertools
import os
import re
import shutil
import signal
import sys

import pytest

from kerasdp import Config, sweep
from kerasdp.cli.main import parse_recipe
from kerasdp.errors import NonFiniteLossError, RunError, UserError
from tests.helpers import BACKENDS, ROOT, run, start

SHORT = ("--device=cpu", "--model=mlp", "--batch_size=256", "--epochs=2", "--max_steps=12")


def rows_in(workdir):
    with open(workdir / "sweep.csv", newline="") as file:
        return [{name: row[name] for name in ("seed", "learning_rate", "loss", "val_loss") if name in row}
                for row in csv.DictReader(file)]  # fmt: skip


def recipe(*flags, backend, **settings):
    return run("recipes/sweep.py", f"--backend={backend}", *SHORT, *flags, backend=backend, **settings)


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sweep_that_is_killed_continues(backend, tmp_path):
    """Killed in the second of two runs: the first is not trained again, the second continues at its next step."""
    flags = (f"--backend={backend}", *SHORT, "--sweep=seed=1,2", f"--workdir={tmp_path}/sweep")
    program = start("recipes/sweep.py", *flags, "--checkpoint_every=1", backend=backend)
    second = next(line for line in program.stdout if line.startswith("run 2 of 2"))[len("run 2 of 2: ") :].strip()
    first = {"seed=1": "seed=2", "seed=2": "seed=1"}[second]
    folder = tmp_path / "sweep" / second / "checkpoints"
    while not (folder.is_dir() and any(path.suffix == ".safetensors" for path in folder.iterdir())):
        assert program.poll() is None
    program.send_signal(signal.SIGKILL)
    program.wait(20)
    assert not (tmp_path / "sweep" / "sweep.csv").exists()

    refused = recipe("--sweep=seed=1,2", f"--workdir={tmp_path}/sweep", backend=backend)
    assert refused.returncode == 2 and "holds the runs of an earlier sweep; continue it (--resume)" in refused.stderr
    done = recipe("--sweep=seed=1,2", f"--workdir={tmp_path}/sweep", "--resume", backend=backend)
    assert done.returncode == 0, done.stderr
    assert f"run 1 of 2: {first}: finished before" in done.stdout
    assert re.search(rf"^run 2 of 2: {second}\n(.*\n)*?resumes after step \d+", done.stdout, re.M)
    assert [trial.state.name for trial in kept_in(tmp_path / "sweep").trials] == ["COMPLETE"] * 2
    whole = recipe("--sweep=seed=1,2", f"--workdir={tmp_path}/whole", backend=backend)
    assert whole.returncode == 0, whole.stderr
    assert rows_in(tmp_path / "sweep") == rows_in(tmp_path / "whole") and len(rows_in(tmp_path / "whole")) == 2
    assert (tmp_path / "sweep" / "sweep.png").stat().st_size > 10_000


@pytest.mark.proof
def test_a_search_picks_the_same_again(tmp_path):
    """As many runs as trials; resumed with more of them, the first are those of before."""
    name, flags = BACKENDS[-1], ("--sweep=learning_rate=0.001..0.1", f"--workdir={tmp_path}/search")
    first = recipe(*flags, "--trials=2", backend=name)
    assert first.returncode == 0, first.stderr
    before = rows_in(tmp_path / "search")
    assert len(before) == 2 and all(0.001 <= float(row["learning_rate"]) <= 0.1 for row in before)
    more = recipe(*flags, "--trials=4", "--resume", backend=name)
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


class Stopped(BaseException):
    """A process that is killed: nothing that catches errors sees it."""


def kept_in(workdir):
    optuna = pytest.importorskip("optuna")
    file = optuna.storages.journal.JournalFileBackend(str(workdir / sweep.STUDY_FILE))
    return optuna.load_study(study_name=sweep.STUDY, storage=optuna.storages.journal.JournalStorage(file))


@pytest.fixture
def trained(monkeypatch):
    """The learning rates of runs that train nothing, but leave a history; a rate in `ends` ends the run so."""
    pytest.importorskip("optuna")

    class Rates(list):
        ends = {}

    rates = Rates()

    def launch(train, settings):
        rates.append(settings.learning_rate)
        if settings.learning_rate in rates.ends:
            raise rates.ends[settings.learning_rate]
        os.makedirs(settings.workdir, exist_ok=True)
        with open(os.path.join(settings.workdir, "history.csv"), "w") as file:
            file.write(f"epoch,loss\n1,{abs(settings.learning_rate - 0.02) + 0.01 * settings.batch_size}\n")

    monkeypatch.setattr(sweep, "launch", launch)
    return rates


def stopping_at(function, number):
    """A function of which the call of this number, from 0, ends the process."""
    count = itertools.count()

    def call(*args):
        if next(count) == number:
            raise Stopped
        return function(*args)

    return call


SPACE = {"learning_rate": (0.001, 0.1), "batch_size": (8, 64)}
GRID = {"learning_rate": [0.3, 0.1, 0.2], "batch_size": [8, 16]}


def picks(found):
    return [(trial.number, trial.state.name, trial.params, trial.value) for trial in found.trials]


@pytest.mark.short("grid")
@pytest.mark.parametrize(("space", "num_trials", "total"), [(SPACE, 14, 14), (GRID, None, 6)], ids=["search", "grid"])
def test_a_sweep_that_is_stopped_anywhere_picks_what_it_would_have_picked(space, num_trials, total, trained, tmp_path):
    """In the middle of a run, before its values are picked, and after the first one; the total stays."""
    asked = {"num_trials": num_trials, "seed": 3}
    whole = picks(sweep.run(print, None, space, workdir=str(tmp_path / "whole"), **asked))
    assert len(whole) == total and {state for _, state, _, _ in whole} == {"COMPLETE"}
    table = rows_in(tmp_path / "whole")
    if num_trials is None:
        rates = list(itertools.chain.from_iterable([str(rate)] * 2 for rate in GRID["learning_rate"]))
        assert [row["learning_rate"] for row in table] == rates
        assert len({str(params) for _, _, params, _ in whole}) == total
    else:
        assert len({params["learning_rate"] for _, _, params, _ in whole}) == total  # no value comes again
    for number, place in itertools.product((0, total - 1), ("run", "first value", "second value")):
        folder = tmp_path / f"{place} {number}"
        name, at = ("launch", number) if place == "run" else ("_picked", 2 * number + (place == "second value"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweep, name, stopping_at(getattr(sweep, name), at))
            with pytest.raises(Stopped):
                sweep.run(print, None, space, workdir=str(folder), **asked)
        assert [trial.state.name for trial in kept_in(folder).trials] == ["COMPLETE"] * number + ["RUNNING"]
        trained.clear()
        found = picks(sweep.run(print, None, space, workdir=str(folder), resume=True, **asked))
        if place == "second value":  # the rest of the values is drawn from where the first one was
            assert [pick[:2] for pick in found] == [pick[:2] for pick in whole]
            assert found[: number + (num_trials is None)] == whole[: number + (num_trials is None)]
        else:
            assert found == whole and rows_in(folder) == table
        assert len(trained) == total - number


def test_a_trial_that_fails_is_kept_as_one(trained, tmp_path, capsys):
    trained.ends = {0.1: NonFiniteLossError("the loss became nan"), 0.2: Stopped()}
    asked = {"workdir": str(tmp_path), "batch_size": 8}
    with pytest.raises(Stopped):
        sweep.run(print, None, {"learning_rate": [0.1, 0.2, 0.3]}, **asked)
    trained.ends = {0.1: NonFiniteLossError("the loss became nan")}
    found = sweep.run(print, None, {"learning_rate": [0.1, 0.2, 0.3]}, resume=True, **asked)
    assert trained.count(0.1) == 1  # not once more
    assert {trial.params["learning_rate"]: trial.state.name for trial in found.trials} == {
        0.1: "FAIL", 0.2: "COMPLETE", 0.3: "COMPLETE",
    }  # fmt: skip
    assert found.best_params == {"learning_rate": 0.2}
    assert found.best_trial.user_attrs == {"workdir": str(tmp_path / "learning_rate=0.2")}
    assert re.search(r"^0\.1 .* the loss became nan$", capsys.readouterr().out, re.M)
    with pytest.raises(RunError, match="no run of the sweep came to its end; the first: the loss became nan"):
        sweep.run(print, None, {"learning_rate": [0.1]}, workdir=str(tmp_path / "all"))


def test_what_is_picked_again_is_not_trained_again(trained, tmp_path):
    found = sweep.run(print, None, {"learning_rate": [0.1, 0.2]}, num_trials=8, workdir=str(tmp_path))
    assert len(found.trials) == 8 and sorted(trained) == [0.1, 0.2] and len(rows_in(tmp_path)) == 2


def test_a_sweep_of_other_choices_is_refused(trained, tmp_path):
    asked = {"workdir": str(tmp_path / "sweep"), "epochs": 3}
    sweep.run(print, None, GRID, **asked)
    for space, changes, words in (
        (GRID, {}, "holds the runs of an earlier sweep; continue it"),
        (GRID, {"resume": True, "epochs": 4}, "in epochs: expected 3. Received: 4; repeat the choices of then, or"),
        (GRID, {"resume": True, "num_trials": 7}, "in --trials: expected False. Received: True"),
        ({**GRID, "seed": [1]}, {"resume": True}, "in --sweep: expected {'learning_rate': [0.3, 0.1, 0.2], "),
    ):
        with pytest.raises(UserError) as caught:
            sweep.run(print, None, space, **{**asked, **changes})
        assert words in str(caught.value) and "\n" not in str(caught.value)
    trained.clear()
    sweep.run(print, None, GRID, backend="torch", num_devices=2, log_every=1, resume=True, **asked)
    assert not trained


@pytest.mark.parametrize("content", ["garbage\n", "[]\n", "{}\n", '{"op_code": 99}\n'])
def test_a_file_that_optuna_cannot_read_is_one_line(content, trained, tmp_path):
    (tmp_path / sweep.STUDY_FILE).write_text(content)
    with pytest.raises(UserError, match="expected Optuna's journal in .*; choose another folder") as caught:
        sweep.run(print, None, GRID, workdir=str(tmp_path), resume=True)
    assert "\n" not in str(caught.value)


def test_wrong_choices(trained, monkeypatch, tmp_path):
    for space, changes, words in (
        ({"learning_rate": [0.1]}, {"workdir": None}, "add --workdir=FOLDER"),
        ({}, {}, "a sweep needs choices to try"),
        (
            {"learning_rate": (0.1, 0.2)},
            {},
            "a range needs its least and its most, as 0.001..0.1, and a number of trials",
        ),
        (
            {"learning_rate": (0.2, 0.1)},
            {"num_trials": 2},
            "a range needs its least and its most, as 0.001..0.1, and a number of trials",
        ),
        ({"batch_size": [8, 0]}, {"num_trials": 2}, "batch_size: expected a whole number of at least 1. Received: 0"),
    ):
        with pytest.raises(UserError, match=words):
            sweep.run(print, Config(), space, **{"workdir": str(tmp_path / "s"), **changes})
    assert not trained and not (tmp_path / "s").exists()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"Optuna, which is not installed: pip install 'kerasdp\[optuna\]'"):
        sweep.run(print, Config(workdir=str(tmp_path / "s")), GRID)


def test_flags():
    config, space, trials = parse_recipe(
        "sweep", ["", "--sweep=learning_rate=0.001..0.1; batch_size=8..64;gpus=1,2; model=../a.py:f,mlp", "--trials=3"]
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
        parse_recipe("sweep", ["sweep.py", *flags])
    assert words in str(caught.value) and "\n" not in str(caught.value)
