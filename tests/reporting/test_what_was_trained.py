"""The files and lines of a run say what was trained."""

import json

import pytest

from tests.helpers import PROGRAMS, run


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The folders of the two runs, and the first line of each."""
    folder = tmp_path_factory.mktemp("runs")
    done = run(PROGRAMS / "records.py", "torch", 2, folder, backend="torch")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "learning rate" in line]
    return folder / "own", folder / "of_names", lines


def read(folder, name):
    return json.loads((folder / name).read_text())


def test_what_the_user_made(records):
    own, _, (line, _) = records
    found, result = read(own, "config.json"), read(own, "report.json")
    assert found["batch_size"] == 32 and found["seed"] == 0
    expected = {
        "model": "mine", "dataset": None, "optimizer": "Adam", "learning_rate": 0.25, "global_batch_size": 32,
        "epochs": 2,
    }  # fmt: skip
    assert {name: result[name] for name in expected} == expected
    assert "| mine | batch 32 (16 a replica) | learning rate 0.25 |" in line


def test_what_was_made_by_its_name(records):
    _, of_names, (_, line) = records
    assert read(of_names, "report.json")["dataset"] == "synthetic(shape=(28,28,1), num_samples=256)"
    assert "| lenet | batch 64 (32 a replica) | learning rate 0.03 |" in line
