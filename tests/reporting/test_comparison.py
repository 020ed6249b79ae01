"""Runs that are compared by the files that they left."""

import csv
import json
import math

import pytest
from PIL import Image

from kerasdp import Config
from kerasdp.errors import UserError
from kerasdp.reporting.comparison import best_of, draw, find_runs, read_runs, rows_of, score, table, write_csv


def leave_run(folder, losses, *, done=True, devices=1, **settings):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(Config(**settings).as_dict() | {"versions": {"keras": str(folder)}}))
    lines = [f"{epoch},{loss},0.003,2.0,{100 * epoch}" for epoch, loss in enumerate(losses, 1)]
    (folder / "history.csv").write_text("\n".join(["epoch,loss,learning_rate,seconds,images_per_second", *lines]))
    if done:
        (folder / "report.json").write_text(json.dumps({"num_devices": devices}))


def test_runs_in_folders(tmp_path):
    leave_run(tmp_path / "a", [0.9, 0.5, 0.4], devices=2, batch_size=32, workdir="a")
    leave_run(tmp_path / "a" / "fit-2", [0.3], devices=2, batch_size=16, workdir="a")
    leave_run(tmp_path / "b" / "c", [0.8, 0.7], done=False, batch_size=32, learning_rate=0.1, verbose=0)
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "checkpoints" / "config.json").write_text("{}")  # not a run's
    folders = find_runs(str(tmp_path))
    assert folders == [f"{tmp_path}/a", f"{tmp_path}/a/fit-2", f"{tmp_path}/b/c"]
    runs = read_runs(folders)
    assert [run.name for run in runs] == ["a", "a/fit-2", "b/c"]
    # What was asked for, but for the devices: how many there were. Where the files are is no choice.
    assert [run.choices for run in runs] == [
        {"num_devices": 2, "batch_size": 32, "learning_rate": None},
        {"num_devices": 2, "batch_size": 16, "learning_rate": None},
        {"num_devices": None, "batch_size": 32, "learning_rate": 0.1},
    ]
    rows = rows_of(runs)
    assert rows[0] == {
        "run": "a", "num_devices": 2, "batch_size": 32, "learning_rate": None, "epochs": 3, "best_epoch": 3,
        "loss": 0.4, "seconds": 6.0, "images_per_second": 250.0,  # without the first epoch
    }  # fmt: skip
    assert rows[2]["error"] == "not finished" and rows[2]["learning_rate"] == 0.1
    lines = table(rows).splitlines()
    assert lines[0].split()[-2:] == ["samples/s", "error"] and lines[3].endswith("not finished")
    write_csv(rows, str(tmp_path / "runs.csv"))
    with open(tmp_path / "runs.csv") as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["0.4", "0.3", "0.7"]
    assert best_of(runs).name == "a/fit-2"
    assert read_runs(folders[:1])[0].choices == {}


def test_the_rate_of_the_optimizer_is_known(tmp_path):
    """The report has it; of a schedule it has the first rate alone, which is not the one that was chosen."""
    for name, rate, schedule in (("a", 0.03, "constant"), ("b", 0.0003, "WarmedUp"), ("c", 0.001, "constant")):
        leave_run(tmp_path / name, [0.5], learning_rate=0.1 if name == "c" else None)
        report = {"num_devices": 1, "learning_rate": rate, "schedule": schedule}
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    assert [run.choices["learning_rate"] for run in read_runs(find_runs(str(tmp_path)))] == [0.03, None, 0.1]


def test_the_table_shows_the_best_epoch_and_what_was_validated(tmp_path):
    leave_run(tmp_path / "a", [])
    rows = [[1, 0.9, 0.8, 0.7, 0.6], [2, 0.4, 0.9, 0.3, 0.8], [3, 0.2, 1.0, 0.5, 0.7]]
    with open(tmp_path / "a" / "history.csv", "w", newline="") as file:
        csv.writer(file).writerows([["epoch", "loss", "accuracy", "val_loss", "val_accuracy"], *rows])
    rows = rows_of(read_runs([str(tmp_path / "a")]))
    assert rows[0]["best_epoch"] == 2 and rows[0]["loss"] == 0.2  # which a CSV file has
    assert [line.split() for line in table(rows).splitlines()] == [
        ["run", "epochs", "best_epoch", "val_loss", "val_accuracy", "seconds"],
        ["a", "3", "2", "0.5", "0.7", "0"],
    ]


def test_a_picture_of_many_runs_names_the_best(tmp_path):
    for number in range(20):
        leave_run(tmp_path / "runs" / f"{number:02d}", [1 / (number + epoch) for epoch in (1, 2)], seed=number)
    runs = read_runs(find_runs(str(tmp_path)))
    assert runs[0].choices == {"seed": 0}
    draw(runs, str(tmp_path / "many.png"))
    draw(runs[:2], str(tmp_path / "few.png"))
    with Image.open(tmp_path / "many.png") as many, Image.open(tmp_path / "few.png") as few:
        assert many.height > few.height + 100 and many.width == few.width == 600


def test_what_cannot_be_compared(tmp_path):
    with pytest.raises(UserError, match="expected a folder with runs, which have a config.json each. Received: "):
        find_runs(str(tmp_path))
    with pytest.raises(UserError, match="expected the folder of a run, with a config.json. Received: "):
        read_runs([str(tmp_path)])
    leave_run(tmp_path / "nan", [math.nan])
    leave_run(tmp_path / "good", [0.5])
    runs = read_runs(find_runs(str(tmp_path)))
    assert best_of(runs).name == "good" and score(runs[1]) == math.inf
    (tmp_path / "good" / "history.csv").unlink()
    (run,) = read_runs([str(tmp_path / "good")])
    assert run.history == [] and rows_of([run])[0]["epochs"] == 0
    draw([run], str(tmp_path / "none.png"))
    assert not (tmp_path / "none.png").exists()
