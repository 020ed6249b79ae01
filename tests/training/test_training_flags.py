"""Schedules, averaged weights, label smoothing, augmentation, early stopping, profiles and trackers by flag."""

import importlib.util
import json
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from kerasdp.config import Config
from kerasdp.config.validation import check_installed
from kerasdp.errors import UserError
from kerasdp.models.classifiers import augmented
from kerasdp.reporting.run_files import Trackers
from kerasdp.training.callbacks import make_callbacks
from kerasdp.training.optimizers import make_loss, make_optimizer, make_schedule
from tests.helpers import BACKENDS, run

EVERYTHING = [
    "--schedule=cosine", "--warmup=3", "--ema=0.9", "--label_smoothing=0.1",
    "--augment=flip, translate(factor=0.1), rotate, brightness",
]  # fmt: skip


def rates(steps, num_samples=100, **choices):
    """Of these updates, by number from 0; 10 an epoch."""
    made = make_schedule(Config(batch_size=10, **choices), 0.4, num_samples)
    return [float(keras.ops.convert_to_numpy(made(step))) for step in steps]


def test_schedules_by_their_formulas():
    assert rates([0, 10, 20], schedule="linear", epochs=2) == pytest.approx([0.4, 0.2, 0.0])
    expected = [0.2 * (1 + math.cos(math.pi * step / 20)) for step in (0, 5, 20)]
    assert rates([0, 5, 20], schedule="cosine", epochs=2) == pytest.approx(expected)
    # Behind every second epoch: updates 20 and 40 are the first of the third and the fifth.
    stairs = rates([0, 19, 20, 39, 40], schedule="step(every=2, factor=0.5)", epochs=6)
    assert stairs == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.1])
    assert rates([0, 1, 3, 4, 9], warmup=4) == pytest.approx([0.08, 0.16, 0.32, 0.4, 0.4])
    assert rates([3, 4, 20], schedule="linear", epochs=2, warmup=4) == pytest.approx([0.32, 0.4, 0.0])
    assert rates([0, 5], schedule="linear", epochs=9, max_steps=5) == pytest.approx([0.4, 0.0])
    assert make_schedule(Config(), 0.4, None) == 0.4


def test_an_optimizer_with_a_schedule_is_saved_and_loaded():
    class Train:
        num_samples = 640

    optimizer = make_optimizer(Config(schedule="cosine", warmup=2, ema=0.99, learning_rate=0.5), Train())
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.use_ema and again.ema_momentum == 0.99
    assert float(keras.ops.convert_to_numpy(again.learning_rate)) == pytest.approx(0.5 / 3)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"schedule": "zigzag"}, "--schedule: expected one of constant, cosine, linear, step. Received: 'zigzag'"),
        ({"warmup": -1}, "--warmup: expected a whole number of updates, from 0. Received: -1"),
        ({"ema": 1.0}, "--ema: expected a number above 0 and below 1"),
        ({"label_smoothing": 1.0}, "--label_smoothing: expected a number from 0, below 1"),
        ({"augment": "flip, cutmix"}, "--augment: expected some of flip, translate"),
        ({"early_stopping": 0}, "--early_stopping: expected a whole number of at least 1"),
        ({"ema": 0.9, "early_stopping": 2}, "--ema and --early_stopping do not go together"),
        ({"profile": "8:5", "workdir": "w"}, "--profile: expected a step, or the first and the last one as 5:8"),
        ({"profile": "5"}, "add --workdir=FOLDER"),
        ({"tracker": "comet", "workdir": "w"}, "--tracker: expected some of tensorboard, wandb, mlflow"),
    ],
)
def test_wrong_choices_are_one_line(choices, words, monkeypatch):
    monkeypatch.setenv("KERASDP_FROM_COMMAND_LINE", "1")
    with pytest.raises(UserError) as caught:
        Config(**choices)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choices", "num_samples", "words"),
    [
        ({"schedule": "cosine"}, None, "needs the number of samples: expected make_optimizer"),
        ({"schedule": "cosine", "max_steps": 5, "warmup": 5}, 100, "expected less than 5, all updates. Received: 5"),
        ({"schedule": "step(often=2)"}, 100, "step does not take these arguments"),
        ({"schedule": "step(every=0)"}, 100, "expected every of at least 1"),
        ({"schedule": "constant(of=2)"}, 100, "constant"),
    ],
)
def test_wrong_schedules_are_one_line(choices, num_samples, words):
    with pytest.raises(UserError) as caught:
        make_schedule(Config(**choices), 0.1, num_samples)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_smoothed_labels_are_those_of_keras():
    random = np.random.RandomState(0)
    logits, labels = random.randn(7, 5).astype("float32"), random.randint(0, 5, 7)
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2)(np.eye(5)[labels], logits)
    for shape in ((7,), (7, 1)):
        found = make_loss(Config(label_smoothing=0.2))(labels.reshape(shape), logits)
        assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert isinstance(make_loss(Config()), keras.losses.SparseCategoricalCrossentropy)


def test_augmentation_changes_images_in_training_alone():
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    images = np.random.RandomState(0).randint(0, 256, (4, 8, 8, 1)).astype("uint8")
    everything = "flip, translate(factor=0.2), zoom, contrast, rotate, brightness"
    built = augmented(model, Config(augment=everything), (8, 8, 1))
    flat = images.reshape(4, -1).astype("float32")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(built(images, training=False)), flat)
    assert np.abs(keras.ops.convert_to_numpy(built(images, training=True)) - flat).max() > 1
    assert augmented(model, Config(), (8, 8, 1)) is model
    with pytest.raises(UserError, match="expected images of shape"):
        augmented(model, Config(augment="flip"), (8,))
    with pytest.raises(UserError, match="rotate does not take these arguments"):
        augmented(model, Config(augment="rotate(angle=3)"), (8, 8, 1))


def test_callbacks_are_made_when_asked_for():
    assert make_callbacks(Config()) == []
    (stopping,) = make_callbacks(Config(early_stopping=2))
    assert (stopping.patience, stopping.restore_best_weights) == (2, True)
    assert stopping.get_monitor_value({"loss": 0.5, "val_loss": 0.7}) == 0.7
    assert stopping.get_monitor_value({"loss": 0.5}) == 0.5


def train(workdir, backend, count, *flags):
    flags = [f"--workdir={workdir}", f"--backend={backend}", f"--gpus={count}", "--device=cpu", *flags]
    flags += ["--log_every=1", "--batch_size=300", "--epochs=2"]
    done = run("recipes/train.py", *EVERYTHING, *flags, backend=backend)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines], json.loads((workdir / "report.json").read_text())


@pytest.mark.proof  # of `.ci/run`
def test_all_of_them_learn_the_same_on_two_devices(tmp_path):
    backend = "jax" if "jax" in BACKENDS else BACKENDS[0]
    flags = ["--augment=flip", "--max_steps=4"]  # which compiles quickly
    expected, found = (train(tmp_path / str(count), backend, count, *flags)[0] for count in (1, 2))
    assert len(found) == 4 and np.ptp(found) > 0.001
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.proof
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_of_them_learn_the_same_and_resume(backend, count, tmp_path):
    """On one device of jax, and on these; stopped in the second epoch, and resumed bit by bit."""
    expected, _ = train(tmp_path / "first", "jax" if "jax" in BACKENDS else BACKENDS[0], 1)
    found, report = train(tmp_path / "found", backend, count)
    assert len(found) == 10 and np.ptp(found) > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (report["optimizer"], report["schedule"]) == ("SGD", "WarmUp")
    assert report["learning_rate"] == pytest.approx(0.03 / 4)
    cut = tmp_path / "cut"
    train(cut, backend, count, "--max_steps=10", "--checkpoint_every=7")
    for path in (cut / "checkpoints").glob("*"):
        if path.name != "step-00000007.safetensors":
            path.unlink()
    resumed, again = train(cut, backend, count, "--max_steps=10", "--resume")
    assert resumed == found
    assert again["final"] == report["final"]


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_averaged_weights_are_evaluated_and_stay(backend, tmp_path):
    """The exported model has the validation loss of the last epoch, which the last weights have not."""
    file = tmp_path / "model.keras"
    _, report = train(tmp_path / "run", backend, 2, f"--export={file}", "--label_smoothing=0")
    flags = [f"--checkpoint={file}", "--dataset=digits", f"--backend={backend}", "--device=cpu"]
    flags += [f"--workdir={tmp_path / 'evaluated'}"]
    done = run("recipes/evaluate.py", *flags, backend=backend)
    assert done.returncode == 0, done.stderr
    final = report["final"]
    assert f"accuracy {final['val_accuracy']:.4f}, loss {final['val_loss']:.4f}" in done.stdout


@pytest.mark.proof
def test_early_stopping_stops(tmp_path):
    flags = [
        "--backend=jax",
        "--device=cpu",
        "--model=mlp",
        "--epochs=50",
        "--learning_rate=3",
        f"--workdir={tmp_path}",
    ]
    done = run("recipes/train.py", *flags, "--early_stopping=2", backend="jax" if "jax" in BACKENDS else None)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["epochs"] < 50


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_profile_changes_nothing(backend, tmp_path):
    plain, _ = train(tmp_path / "plain", backend, 1, "--max_steps=5")
    found, _ = train(tmp_path / "profiled", backend, 1, "--max_steps=5", "--profile=2:3")
    assert found == plain
    files = [path for path in (tmp_path / "profiled" / "profile").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) > 10_000


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
    losses = [json.loads(line)["loss"] for line in (workdir / "steps.jsonl").read_text().splitlines()]
    if tracker == "wandb":
        assert len([path for path in (workdir / "wandb").iterdir() if path.name.endswith(name)]) == 2  # both parts
        return
    from mlflow import MlflowClient

    history = MlflowClient(tracking_uri=store).get_metric_history(name, "step/loss")
    assert [metric.value for metric in sorted(history, key=lambda metric: metric.step)] == losses
    assert MlflowClient(tracking_uri=store).get_run(name).data.params["batch_size"] == "300"


def test_a_tracker_that_is_not_installed_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else importlib)
    with pytest.raises(UserError, match=r"wandb is not installed; add it: pip install 'kerasdp\[wandb\]'"):
        check_installed(Config(tracker="tensorboard,wandb", workdir=str(tmp_path)))


def test_a_tracker_that_cannot_begin_is_one_line(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where its folder should be")
    facts = SimpleNamespace(config=Config(tracker="tensorboard", workdir=str(tmp_path)))
    with pytest.raises(UserError, match="--tracker=tensorboard cannot begin: .*Not a directory"):
        Trackers(facts, str(tmp_path), 0)
