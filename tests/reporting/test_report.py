"""What a run leaves behind."""

import csv
import json
import os
import pty
import shutil
import sys

import keras
import pytest

import kerasdp
from kerasdp.config import Config
from kerasdp.reporting import report, run_files
from kerasdp.run_state import RunState


def facts(tmp_path, **changes):
    values = {
        "config": Config(backend="jax", batch_size=61, workdir=str(tmp_path)),
        "devices": "2 virtual CPU devices (no GPU found)",
        "device_kind": "cpu",
        "num_devices": 2,
        "num_processes": 1,
        "model": "lenet",
    }
    return report.Facts(**(values | changes))


def result(of):
    state = RunState()
    state.step, state.epoch_seconds, state.epoch_rates = 8, [9.0, 2.0, 1.0, 3.0], [10.0, 200.0, 100.0, 300.0]
    rule = {"optimizer": "SGD", "learning_rate": 0.03, "schedule": "constant"}
    return report.result(of, state, rule, {"accuracy": 0.5, "loss": 0.9, "val_accuracy": 0.625}, 123)


def test_the_speed_is_of_the_epochs_after_a_resume():
    state = RunState()
    state.epoch_seconds, state.epoch_rates, state.num_restored = [9.0, 9.0, 5.0, 2.0], [1.0, 1.0, 2.0, 7.0], 2
    found = report.result(facts(None), state, {}, {"loss": 1.0}, 0)
    assert (found["seconds_per_epoch"], found["images_per_second"], found["epochs"]) == (2.0, 7.0, 4)


def test_lines(tmp_path):
    of = facts(tmp_path, folder="X/fit-2")
    assert report.start_line(of, 0.03) == (
        "jax on 2 virtual CPU devices (no GPU found) | lenet | batch 61 (31 a replica) | learning rate 0.03 | float32"
    )
    assert "| learning rate 0 now, by CosineDecay |" in report.start_line(of, 0.0, "CosineDecay")
    assert "| batch 61 | learning rate 0.03 |" in report.start_line(facts(tmp_path, num_devices=1), 0.03)
    assert report.end_line(of, result(of)) == (
        "validation accuracy 0.6250, 2.00 s/epoch, 200 samples/s on 2 virtual CPU devices (no GPU found); "
        "files in X/fit-2"
    )
    assert report.end_line(facts(tmp_path, folder=None), result(of)).endswith("(no GPU found)")
    assert of.title == "lenet | jax on 2 virtual CPU devices (no GPU found) | batch 61"
    assert facts(tmp_path, data="digits").title.startswith("lenet on digits | jax on ")
    assert report.epoch_line(0, 3, {"loss": 0.5}, 1.5, 2000.0) == "epoch 1/3 - 1.5 s - 2,000 samples/s - loss 0.5000"


def test_files(tmp_path):
    settings = Config(backend="jax", batch_size=61, workdir=str(tmp_path), tracker="tensorboard")
    of = facts(tmp_path, config=settings)
    files = run_files.RunFiles(str(tmp_path), of)
    files.add_step(10, 0, 0.75, 0.03, 1000.0)
    files.add_epoch(0, {"loss": 0.7, "accuracy": 0.5}, 2.0, 500.0)
    files.add_epoch(1, {"loss": 0.6, "accuracy": 0.6, "val_loss": 0.8, "val_accuracy": 0.4}, 1.0, 900.0)
    files.add_result(result(of))
    files.close()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("versions")["python"]
    config.pop("flags", None)
    assert [config.pop(name) for name in ("model", "dataset", "epochs")] == ["lenet", of.data or None, of.epochs]
    assert Config(**config) == of.config
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 10, "epoch": 1, "loss": 0.75, "learning_rate": 0.03, "images_per_second": 1000.0,
    }  # fmt: skip
    with open(tmp_path / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert [row["val_loss"] for row in rows] == ["", "0.8"]
    assert json.loads((tmp_path / "report.json").read_text()).keys() >= {
        "backend", "device_kind", "optimizer", "learning_rate", "schedule",
        "num_devices", "num_processes", "model", "dataset", "global_batch_size", "epochs",
        "steps", "final", "seconds_per_epoch", "images_per_second", "peak_memory_bytes", "versions",
    }  # fmt: skip
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any((tmp_path / "tensorboard").iterdir())


def test_files_go_on(tmp_path):
    """Behind step 20, although the run that was killed had come to step 30, and to half of its next line."""
    of = facts(tmp_path)
    files = run_files.RunFiles(str(tmp_path), of)
    for step in (10, 20, 30):
        files.add_step(step, 0, 1 / step, 0.03, 1000.0)
    files.add_epoch(0, {"loss": 0.7}, 2.0, 500.0)
    history = list(files.history)
    files.add_epoch(1, {"loss": 0.6}, 2.0, 500.0)
    files.close()
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 40, "ep')
    files = run_files.RunFiles(str(tmp_path), of, last_step=20, history=history)
    files.add_step(30, 1, 0.25, 0.03, 1000.0)
    files.add_epoch(1, {"loss": 0.5}, 2.0, 500.0)
    files.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 0.1), (20, 0.05), (30, 0.25)]
    with open(tmp_path / "history.csv", newline="") as file:
        assert [(row["epoch"], row["loss"]) for row in csv.DictReader(file)] == [("1", "0.7"), ("2", "0.5")]


def test_a_folder_that_is_gone_is_reported_once_for_each_file(tmp_path, capsys):
    files = run_files.RunFiles(str(tmp_path / "run"), facts(tmp_path))
    files.add_step(10, 0, 0.5, 0.03, 1000.0)
    shutil.rmtree(tmp_path / "run")
    for epoch in range(2):
        files.add_step(20 + epoch, epoch, 0.5, 0.03, 1000.0)
        files.add_epoch(epoch, {"loss": 0.7}, 2.0, 500.0)
    files.close()
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"warning: cannot write {tmp_path}/run/{name}" for name in ("steps.jsonl", "history.csv", "curves.png")
    ]


def test_a_resumed_run_takes_whatever_lies_in_its_folder(tmp_path, capsys):
    """Lines that are no text or no object, and folders where files were: left out, or named in one line each."""
    folder = tmp_path / "run"
    folder.mkdir()
    line = b'{"step": 1, "loss": 0.5}\n'
    (folder / "steps.jsonl").write_bytes(line + b'\xff{"step": 1}\n' + b"[1]\n" + b"[" * 100000 + b"\n" + line)
    for name in ("report.json", "history.csv"):
        (folder / name / "inner").mkdir(parents=True)
    files = run_files.RunFiles(str(folder), facts(tmp_path), last_step=1, history=[{"epoch": 1, "loss": 0.5}])
    files.add_result({"final": {}})
    files.close()
    assert (folder / "steps.jsonl").read_bytes() == 2 * line
    told = capsys.readouterr().err.splitlines()
    assert sorted(told) == [
        f"warning: cannot write {folder}/{name} (Is a directory); training continues"
        for name in ("history.csv", "report.json")
    ]


@pytest.mark.parametrize("verbose", [None, 0])
def test_a_terminal_says_at_once_what_starts(verbose, monkeypatch):
    """The frameworks take ten seconds or more to start; a file of errors does not get the line."""
    ours, theirs = pty.openpty()
    keras.utils.set_random_seed(0)  # of another test's seed a line would say that it has no effect
    with open(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert kerasdp.launch(lambda runner: 3, device="cpu", verbose=verbose) == 3
        stderr.write("end")
        stderr.flush()
        received = b""
        while not received.endswith(b"end"):
            received += os.read(ours, 100)
    os.close(ours)
    assert received.decode() == ("" if verbose == 0 else f"starting {keras.config.backend()} ...\r\n") + "end"
