"""A step of a run is trained again as it was, and the samples that made its loss are named."""

import functools
import json
import os

import numpy as np
import pytest

from kerasdp.checkpoint import files
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.config import Config, Request
from kerasdp.errors import UserError
from kerasdp.launch import launch
from kerasdp.parity import Replayed, Share, replay
from kerasdp.parity.replay import _begun
from tests.helpers import BACKENDS, PROGRAMS, result_of, run


def never(runner):
    raise AssertionError


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="--checkpoint: expected the --workdir of a run. Received: "):
        replay(never, Request(checkpoint=str(tmp_path)), 3)
    with pytest.raises(UserError, match="--step: expected a step of the run, from 1. Received: 0"):
        replay(never, Request(checkpoint=str(tmp_path)), 0)


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("field", ["model", "dataset", "optimizer"])
def test_code_that_a_file_names_is_not_run(tmp_path, field, is_saved):
    """Neither of a checkpoint, nor of a run that had none yet."""
    config = Config(backend=BACKENDS[0]).as_dict() | {field: "evil.py:build"}
    if is_saved:
        (tmp_path / "checkpoints").mkdir()
        state = {"step": 2, "config": config, "saved_by": {"backend": BACKENDS[0], "devices": 1}}
        files.save(files.path_of(f"{tmp_path}/checkpoints", 2), Checkpoint(arrays={}, state=state))
    else:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"--{field}: .* names evil.py:build, which is code .* --trust_checkpoint"):
        replay(never, Request(checkpoint=str(tmp_path)), 3)


@pytest.mark.parametrize("text", ["", "[1]", '{"model_type": "bert"}'])
def test_a_folder_of_something_else(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="--checkpoint: expected the --workdir of a run"):
        replay(never, Request(checkpoint=str(tmp_path)), 3)


def test_no_url_is_reached_that_a_file_names(tmp_path):
    config = Config(backend=BACKENDS[0]).as_dict() | {"checkpoint_dir": "s3://theirs/run"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="are in s3://theirs/run: give that, if you trust it"):
        replay(never, Request(checkpoint=str(tmp_path)), 3)


def test_a_step_is_as_the_run_was_then(tmp_path):
    """A run that was resumed with other choices: those of the step stand in the next checkpoint, or in config.json."""
    (tmp_path / "checkpoints").mkdir()
    for step, backend in ((2, "torch"), (4, "jax")):
        config = Config(backend=backend).as_dict()
        state = {"step": step, "config": config, "saved_by": {"backend": backend, "devices": 1}}
        files.save(files.path_of(f"{tmp_path}/checkpoints", step), Checkpoint(arrays={}, state=state))
    (tmp_path / "config.json").write_text(json.dumps(Config(backend="tensorflow").as_dict()))
    found = {step: _begun(str(tmp_path), step) for step in (1, 2, 3, 4, 5)}
    assert [begun for begun, _, _ in found.values()] == [0, 0, 2, 2, 4]
    backends = [known["saved_by"]["backend"] for _, _, known in found.values()]
    assert backends == ["torch", "torch", "jax", "jax", "tensorflow"]


def test_what_is_told_and_written(tmp_path):
    images = np.random.RandomState(0).rand(3, 8, 8, 1)
    gradient = np.array([3.0, -4.0])
    found = Replayed(
        run="runs/mine", step=1234, epoch=3, begun=1200, way="torch x 1", loss=0.5, learning_rate=0.25,
        samples=np.array([7, 9, 4]), inputs={"inputs": images}, outputs={"dense": np.array([[1.0, np.nan]])},
        gradients={"dense/kernel": gradient}, before={"dense/kernel": gradient},
        shares=[Share(sample=9, loss=0.4, gradient=0.9)],
    )  # fmt: skip
    words = str(found)
    assert "step 1,234 of runs/mine, epoch 3, on torch x 1, trained from the checkpoint of step 1,200" in words
    assert "loss 0.5 | norm of the gradient 5 | learning rate 0.25" in words and "1 not finite" in words
    paths = found.save(str(tmp_path / "new"))
    assert [path.rpartition("/")[2] for path in paths] == ["replay.json", "replay.safetensors", "samples.png"]
    facts = json.loads((tmp_path / "new" / "replay.json").read_text())
    assert facts["samples"] == [7, 9, 4] and facts["shares"] == [{"sample": 9, "loss": 0.4, "gradient": 0.9}]


def train(units, runner):
    import keras

    with runner.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)])
        model.layers[0].trainable = False
        model.compile("adam", "mse")
    runner.fit(model, np.arange(36.0).reshape(12, 3), np.arange(12.0), batch_size=4, epochs=2)


def test_a_run_whose_checkpoints_hold_no_frozen_weights(tmp_path):
    """From its beginning and from a checkpoint. What trains something else is refused, wherever it begins."""
    choices = {"workdir": str(tmp_path), "checkpoint_every": "2", "checkpoint_weights": "trained", "log_every": 1}
    launch(functools.partial(train, 4), backend=BACKENDS[0], num_devices=1, device="cpu", verbose=0, **choices)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    begun_of_last = 4 if os.path.exists(files.path_of(f"{tmp_path}/checkpoints", 4)) else 3  # while 3 was written
    for step, begun in ((1, 0), (6, begun_of_last)):
        found = replay(functools.partial(train, 4), Request(checkpoint=str(tmp_path)), step)
        assert (found.begun, found.loss) == (begun, losses[step - 1])
        with pytest.raises(
            UserError, match="replay: what is trained differs from the run in model: expected the digest"
        ):
            replay(functools.partial(train, 5), Request(checkpoint=str(tmp_path)), step)


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_again(tmp_path, backend):
    """Ten steps bit by bit, weights too; two on each other backend; a bad sample among 10,000."""
    others = ",".join(name for name in BACKENDS if name != backend)
    found = result_of(run(PROGRAMS / "replays.py", backend, tmp_path, 10, others, timeout=900))
    assert len(found["losses"]) == 10 and found["rows"] == 64
    for step, begun, loss, again in found["losses"]:
        assert loss == again and begun in ((step - 1) // 50 * 50, 157)
    assert found["differing"] == [] and found["two"][0] == found["two"][1]
    assert len(found["outputs"]) == 6 and len(found["gradients"]) == 5
    for losses in found["others"].values():
        for of_run, again in losses:
            np.testing.assert_allclose(again, of_run, rtol=2e-6)
    assert found["nan"]["failed"] and found["nan"]["shares"][0][0] == 1234
    assert np.isfinite(found["nan"]["shares"][1][1])
    sample, loss, gradient = found["large"]["shares"][0]
    assert sample == 1234 and loss > 0.5 * found["large"]["loss"] and gradient > 0.9
    print(f"\n{backend}: {np.median(found['seconds']):.1f} s a step")
