"""Trackers by flag."""

import json
import sys
from types import SimpleNamespace

import pytest

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.reporting.run_files import Trackers
from tests.helpers import losses_in, run


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_trackers_get_the_numbers(tracker, tmp_path):
    """Offline; a resumed run is the same run."""
    pytest.importorskip(tracker, reason=f"{tracker} is not installed: pip install 'kerasdp[{tracker}]'")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    settings = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": store}
    workdir = tmp_path / "run"
    for flags in (["--max_steps=5"], ["--max_steps=10", "--resume"]):
        done = run(
            "recipes/train.py", "--model=mlp", "--device=cpu", "--batch_size=300", "--epochs=2", "--log_every=1",
            f"--tracker={tracker}", f"--workdir={workdir}", *flags, **settings,
        )  # fmt: skip
        assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    (name,) = json.loads((workdir / "trackers.json").read_text()).values()
    if tracker == "wandb":
        assert len([path for path in (workdir / "wandb").iterdir() if path.name.endswith(name)]) == 2  # both parts
        return
    from mlflow import MlflowClient

    history = MlflowClient(tracking_uri=store).get_metric_history(name, "step/loss")
    assert [metric.value for metric in sorted(history, key=lambda metric: metric.step)] == losses_in(workdir)
    assert MlflowClient(tracking_uri=store).get_run(name).data.params["batch_size"] == "300"


def test_a_tracker_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    facts = SimpleNamespace(config=Config(tracker="wandb", workdir=str(tmp_path)))
    with pytest.raises(UserError, match=r"--tracker=wandb cannot start \(.*wandb"):
        Trackers(facts, str(tmp_path), 0)


def test_a_tracker_that_cannot_begin_is_one_line(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where its folder should be")
    facts = SimpleNamespace(config=Config(tracker="tensorboard", workdir=str(tmp_path)))
    with pytest.raises(UserError, match=r"--tracker=tensorboard cannot start \(.*Not a directory"):
        Trackers(facts, str(tmp_path), 0)
