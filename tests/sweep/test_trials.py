"""The runs of a sweep, and what they leave together."""

import csv

import pytest
from PIL import Image

from kerasdp import Config
from kerasdp.errors import UserError
from kerasdp.sweep import Trial, finished, trials_of, write_results


def test_the_trials_of_a_grid():
    trials = trials_of(
        Config(checkpoint_dir="s3://b/s"), "runs/s", {"learning_rate": [0.1, 0.2], "model": ["mlp", "a/b.py:f"]}
    )
    assert [trial.name for trial in trials] == [
        "learning_rate=0.1, model=mlp", "learning_rate=0.1, model=a/b.py:f",
        "learning_rate=0.2, model=mlp", "learning_rate=0.2, model=a/b.py:f",
    ]  # fmt: skip
    last = trials[-1].settings
    assert (last.learning_rate, last.model) == (0.2, "a/b.py:f")
    assert last.workdir == trials[-1].folder == "runs/s/learning_rate=0.2,model=a_b.py:f"
    assert last.checkpoint_dir == "s3://b/s/learning_rate=0.2,model=a_b.py:f"
    for grid, words in (
        ({}, "add --sweep="),
        ({"workdir": ["a"]}, "Received: workdir"),
        ({"batch_size": [0]}, "--batch_size: expected a whole number of at least 1. Received: 0"),
    ):
        with pytest.raises(UserError, match=words):
            trials_of(Config(), "runs/s", grid)


def test_a_trial_of_two_fits_has_the_history_of_the_last(tmp_path):
    (trial,) = trials_of(Config(), str(tmp_path), {"seed": [1]})
    assert finished(trial).history == []
    for number in (1, 2):
        folder = tmp_path / "seed=1" / ("" if number == 1 else "fit-2")
        folder.mkdir()
        (folder / "history.csv").write_text(f'epoch,loss,scores\n1,0.{number},"[1, 2]"\n')
    assert finished(trial).history == [{"epoch": 1.0, "loss": 0.2}]


def test_table_and_picture(tmp_path, capsys):
    def trial(rate, *losses, error=""):
        history = [
            {"epoch": number, "loss": loss, "val_loss": 2 * loss, "accuracy": 1 - loss, "seconds": 0.5}
            for number, loss in enumerate(losses, 1)
        ]
        choices, settings = {"learning_rate": rate}, Config(learning_rate=rate)
        known = {"folder": f"{tmp_path}/{rate}", "choices": choices, "settings": settings, "history": history}
        return Trial(name=f"learning_rate={rate}", error=error, **known)

    trials = [trial(0.1, 0.9, 0.5), trial(0.2, 0.8, 0.25), trial(9.0, 0.1, error="the loss became nan"), trial(0.3)]
    write_results(trials, str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["learning_rate", "epochs", "best_epoch", "val_loss", "accuracy", "seconds", "error"]
    assert lines[2].split() == ["0.2", "2", "2", "0.5", "0.75", "1"]
    assert lines[3].endswith("the loss became nan")
    assert lines[5] == f"best: learning_rate=0.2; files in {tmp_path}/0.2"
    with open(tmp_path / "sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["learning_rate"] for row in rows] == ["0.1", "0.2", "9.0", "0.3"] and rows[0]["val_loss"] == "1.0"
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.width > 1000 and len(picture.convert("RGB").getcolors(1 << 20)) > 100
