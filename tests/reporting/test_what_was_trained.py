"""The files and lines of a run say what was trained, and nothing of choices that were none."""

import json

import pytest

from kerasdp.config import Config
from tests.helpers import PROGRAMS, run

OWN = ("model", "dataset", "data_dir", "optimizer", "learning_rate")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The folders of the two runs, and the first line of each."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(PROGRAMS / "records.py", "torch", 2, folder, backend="torch")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "learning rate" in line]
    return folder / "own", folder / "of_flags", lines


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_what_the_user_made_is_no_choice_of_the_run(records):
    own, _, (line, _) = records
    found = read(own, "config.json")
    assert {name: found[name] for name in OWN} == dict.fromkeys(OWN)
    assert found["batch_size"] == 32 and found["epochs"] == 2 and found["seed"] == 0
    result = read(own, "report.json")
    assert {name: result[name] for name in ("model", "dataset", "optimizer", "learning_rate", "global_batch_size")} == {
        "model": "mine", "dataset": None, "optimizer": "Adam", "learning_rate": 0.25, "global_batch_size": 32
    }  # fmt: skip
    assert "| mine | batch 32 (16 a replica) | learning rate 0.25 |" in line


def test_what_was_made_of_choices_is_there(records):
    _, of_flags, (_, line) = records
    found, defaults = read(of_flags, "config.json"), Config().as_dict()
    assert found["dataset"] == read(of_flags, "report.json")["dataset"] == "synthetic(shape=(28,28,1), num_samples=256)"
    assert {name: found[name] for name in OWN if name != "dataset"} == {
        name: defaults[name] for name in OWN if name != "dataset"
    }
    assert "| lenet | batch 64 (32 a replica) | learning rate 0.03 |" in line
