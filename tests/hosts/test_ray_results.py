"""What surrounds Ray: flags, the reports of epochs. Needs no Ray."""

import json
import sys
import threading

import pytest

from kerasdp import Config, ray
from kerasdp.cli.main import parse_recipe
from kerasdp.errors import UserError


def parsed(*flags):
    return parse_recipe("ray_train", ["ray_train.py", *flags])


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


def test_reports_of_epochs_come_while_the_training_runs(tmp_path):
    path, come, seen = str(tmp_path / "epochs.jsonl"), threading.Event(), []

    def report(metrics):
        seen.append(metrics)
        come.set()

    with ray._followed(path, report):
        ray._report(path, {"epoch": 1, "loss": 0.5})
        assert come.wait(10)
        with open(path, "a") as file:  # half of a line is none
            file.write(json.dumps({"epoch": 2})[:-1])
        with open(path, "a") as file:
            file.write("}\n")
        ray._report(path, {"epoch": 3})
    assert seen == [{"epoch": 1, "loss": 0.5}, {"epoch": 2}, {"epoch": 3}]
    with pytest.raises(ZeroDivisionError), ray._followed(path, lambda metrics: 1 // 0):
        ray._report(path, {"epoch": 1})


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
