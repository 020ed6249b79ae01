"""What surrounds Ray: flags, the runs of a sweep, their table and picture, the reports of epochs. Needs no Ray."""

import csv
import json
import sys
import threading

import pytest
from PIL import Image

from kerasdp import Config, ray
from kerasdp.cli.parse import parse_ray
from kerasdp.errors import UserError
from kerasdp.ray import reported, results


def parsed(*flags):
    return parse_ray(["ray_train.py", *flags])


def test_flags():
    config, workers, cpus, grid = parsed("--workers=1:4", "--gpus=2", "--cpus_per_worker=0.5", "--workdir=w")
    assert (config.num_devices, workers, cpus, grid) == (2, (1, 4), 0.5, None)
    _, workers, _, grid = parsed(
        "--sweep=learning_rate=0.01,0.1; gpus=1,2;optimizer=adam,sgd(momentum=0.9, nesterov=True)"
    )
    assert workers == (1, 1)
    assert grid == {
        "learning_rate": [0.01, 0.1], "num_devices": [1, 2], "optimizer": ["adam", "sgd(momentum=0.9, nesterov=True)"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers=0"], "--workers: expected a number, or the fewest and the most as 1:4. Received: '0'"),
        (["--workers=3:2"], "Received: '3:2'"),
        (["--cpus_per_worker=0"], "--cpus_per_worker: expected a number above 0. Received: 0"),
        (["--hosts=2"], "--hosts has no effect here: Ray starts the workers: use --workers"),
        (["--workers=2", "--sweep=seed=1,2"], "--workers has no effect with --sweep"),
        (["--sweep=learning_rate"], "--sweep: expected flags with values"),
        (["--sweep=rate=1,2"], "--sweep: expected flags with values"),
        (["--sweep=batch_size=32,many"], "--sweep: batch_size: "),
    ],
)
def test_wrong_flags(flags, words):
    with pytest.raises(UserError) as caught:
        parsed(*flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_runs_of_a_sweep():
    runs = results.runs_of(
        Config(checkpoint_dir="s3://b/s"), "runs/s", {"learning_rate": [0.1, 0.2], "model": ["mlp", "a/b.py:f"]}
    )
    assert [run.name for run in runs] == [
        "learning_rate=0.1, model=mlp", "learning_rate=0.1, model=a/b.py:f",
        "learning_rate=0.2, model=mlp", "learning_rate=0.2, model=a/b.py:f",
    ]  # fmt: skip
    last = runs[-1].settings
    assert (last.learning_rate, last.model) == (0.2, "a/b.py:f")
    assert last.workdir == "runs/s/learning_rate=0.2,model=a_b.py:f"
    assert last.checkpoint_dir == "s3://b/s/learning_rate=0.2,model=a_b.py:f"
    for grid, words in (
        ({}, "add --sweep="),
        ({"workdir": ["a"]}, "Received: workdir"),
        ({"batch_size": [0]}, "--batch_size: expected a whole number of at least 1. Received: 0"),
    ):
        with pytest.raises(UserError, match=words):
            results.runs_of(Config(), "runs/s", grid)


def test_table_and_picture(tmp_path, capsys):
    def run(rate, *losses, error=""):
        history = [
            {"epoch": number, "loss": loss, "val_loss": 2 * loss, "accuracy": 1 - loss, "seconds": 0.5}
            for number, loss in enumerate(losses, 1)
        ]
        settings = Config(learning_rate=rate, workdir=str(tmp_path))
        return results.Run(choices={"learning_rate": rate}, settings=settings, history=history, error=error)

    runs = [run(0.1, 0.9, 0.5), run(0.2, 0.8, 0.25), run(9.0, 0.1, error="the loss became nan at step 7"), run(0.3)]
    results.write(runs, str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["learning_rate", "epochs", "loss", "val_loss", "accuracy", "seconds", "error"]
    assert lines[2].split() == ["0.2", "2", "0.25", "0.5", "0.75", "1"]
    assert lines[3].endswith("the loss became nan at step 7")
    assert lines[5].startswith("best: learning_rate=0.2;")
    with open(tmp_path / "sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["learning_rate"] for row in rows] == ["0.1", "0.2", "9.0", "0.3"] and rows[0]["val_loss"] == "1.0"
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.width > 1000 and len(picture.convert("RGB").getcolors(1 << 20)) > 100


def test_reports_of_epochs_come_while_the_training_runs(tmp_path):
    path, come, seen = str(tmp_path / "epochs.jsonl"), threading.Event(), []

    def report(metrics):
        seen.append(metrics)
        come.set()

    with reported._followed(path, report):
        reported._report(path, {"epoch": 1, "loss": 0.5})
        assert come.wait(10)
        with open(path, "a") as file:  # half of a line is none
            file.write(json.dumps({"epoch": 2})[:-1])
        with open(path, "a") as file:
            file.write("}\n")
        reported._report(path, {"epoch": 3})
    assert seen == [{"epoch": 1, "loss": 0.5}, {"epoch": 2}, {"epoch": 3}]
    with pytest.raises(ZeroDivisionError), reported._followed(path, lambda metrics: 1 // 0):
        reported._report(path, {"epoch": 1})


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"Ray is not installed: pip install 'kerasdp\[ray\]'"):
        ray.run(print, Config(workdir=str(tmp_path / "run")))
    for choices, words in (
        ({"hosts": 2, "host_rank": 0, "coordinator": "a:1"}, "use --workers"),
        ({"device": "tpu"}, "tpu"),
    ):
        with pytest.raises(UserError, match=words):
            ray.run(print, Config(**choices))
    with pytest.raises(UserError, match="add --workdir=FOLDER"):
        ray.sweep(print, Config(), {"seed": [1, 2]})
