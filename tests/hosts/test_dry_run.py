"""A dry run tells of jobs on machines that are not there, what a run here then does."""

import dataclasses
import json

import numpy as np
import pytest

import kerasdp
from kerasdp.data import datasets
from kerasdp.data.datasets import load_data
from kerasdp.data.sampling import Split
from kerasdp.errors import UserError
from kerasdp.reporting.dry_run import size
from kerasdp.training.dry_run import StepBytes, split_rows
from tests.helpers import BACKENDS, PROGRAMS, ROOT, result_of, run

# Of a message through the sockets of torch's virtual devices.
HEAD = 16


@pytest.mark.proof
@pytest.mark.parametrize(
    ("backend", "count", "model", "batch_norm"),
    [
        (name, count, *case)
        for name in BACKENDS
        for count in (2, 4)
        for case in (("convnet", "sync"), ("convnet", "replica"), ("lenet", "sync"), ("resnet18", "sync"))
    ],
)
def test_a_run_does_what_the_dry_run_told(backend, count, model, batch_norm):
    """Steps, rows of each replica, bytes that a device sends, what model and optimizer hold, the checkpoint's size."""
    config = {
        "num_devices": count, "batch_size": 60, "epochs": 2, "model": model, "batch_norm": batch_norm,
        "dataset": "synthetic(shape=(16,16,3), num_samples=133, num_test_samples=70)", "verbose": 0,
    }  # fmt: skip
    # What jax compiles is counted where no cache has it, which is said before jax is imported.
    warm = {} if backend == "jax" else {"backend": backend}
    done = result_of(run(PROGRAMS / "dry_run.py", backend, json.dumps(config), **warm))
    told, found = done["told"], done["found"]
    data = told["data"]
    assert (told["num_devices"], told["num_processes"]) == (count, found[0]["num_processes"])
    assert told["steps"] == found[0]["steps"] == 6
    assert (data["steps_per_epoch"], data["test_steps"], data["num_test_samples"]) == (3, 2, 70)
    for part, batch_rows in ((data["full_batch"], 60), (data["last_batch"], 13)):
        assert part["num_rows"] == batch_rows
        for rank, of_rank in enumerate(found):
            (rows,) = {rows for number, rows in of_rank["shards"] if number == batch_rows}
            assert rows == part["rows"] * told["num_devices"] // told["num_processes"], rank
    sent = told["step_bytes"]
    summed = sent["gradients"] + sent["metrics"] + sent["statistics"]
    if backend == "torch":  # its messages go through sockets, to each other rank by itself
        gathered = (count - 1) * (sent["gathered"] + HEAD * sent["num_gatherings"])
    else:  # benchmarks/traffic.py counts what has been gathered
        gathered = count * sent["gathered"]
    assert found[0]["sent"] == summed + gathered
    assert told["memory"]["weights"] + told["memory"]["optimizer"] == found[0]["held"]
    # What is told are the arrays; a file has their names, too, and the layers of the model: of resnet18 86 kB.
    assert told["checkpoint_bytes"] <= done["checkpoint_bytes"] <= told["checkpoint_bytes"] + 128_000


OWN_MODEL = """
import keras

def build(input_shape, num_classes):
    inputs = keras.Input(input_shape)
    return keras.Sequential([inputs, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(num_classes)])
"""


def test_a_job_for_512_gpus_is_told_of_on_any_machine(tmp_path):
    """A user-defined model, and more images than memory holds; nothing is left behind."""
    (tmp_path / "my_model.py").write_text(OWN_MODEL)
    data = "synthetic(shape=(224,224,3), num_classes=1000, num_samples=1281167)"
    flags = ["--hosts=64", "--gpus=8", "--batch_size=65536", "--epochs=90", "--model=my_model.py:build"]
    flags += ["--checkpoint_dir=s3://no-such-bucket/run", "--resume", "--max_restarts=2"]  # of the cluster
    words = [f"--backend={BACKENDS[0]}", "--dry_run", f"--dataset={data}", *flags]
    done = run(ROOT / "recipes" / "train.py", *words, backend=BACKENDS[0], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = {line[:15].strip(): line[15:] for line in reversed(lines[1:])}  # of two alike the first
    assert told["devices"].startswith("64 hosts x 8 devices = 512")
    assert told["steps"].startswith("20 an epoch, 90 epochs, 1,800 in all")
    assert told["full batch"] == "65,536 samples: 128 on each of 512 replicas"
    assert (
        told["last batch"]
        == "35,983 samples: 71 on each of 506 replicas, 57 on the next, none on 5, which compute padding"
    )
    gradients = 4 * (3 * 1000 + 1000)
    assert told["gradients"].startswith(f"{size(2 * 511 / 512 * gradients)}: 2 x 511/512 of their {gradients:,} bytes")
    assert len(lines) <= 24 and max(map(len, lines)) <= 130
    assert told["checkpoints"].startswith("32.0 KB after each epoch; 4 are kept")  # with the momentum
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"hosts": 64, "batch_size": 256},
            "--batch_size counts the samples of all devices together: expected at least 512",
        ),
        ({"num_devices": None}, "--dry_run counts no devices here: add --gpus=NUMBER"),
        ({"hosts": 2, "backend": "jax", "strategy": "pipeline", "num_stages": 4}, "there for --backend=torch only"),
        ({"hosts": "2:3", "backend": "jax"}, "hosts leave and join with --backend=torch only"),
        ({"strategy": "pipeline", "num_stages": 3}, "--gpus: expected a multiple of the 3 stages"),
    ],
)
def test_wrong_jobs_are_refused_before_anything_is_built(settings, words):
    def train(runner):
        pytest.fail("the training function was called")

    if settings.get("backend", BACKENDS[0]) not in BACKENDS:
        pytest.skip(f"{settings['backend']} is not installed")
    with pytest.raises(UserError, match=words):
        kerasdp.launch(train, **({"backend": BACKENDS[0], "num_devices": 8, "dry_run": True} | settings))


def test_a_function_without_fit_is_refused():
    with pytest.raises(UserError, match="a training function that calls no fit"):
        kerasdp.launch(lambda runner: None, backend=BACKENDS[0], num_devices=2, dry_run=True)


@pytest.mark.parametrize(("num_rows", "num_replicas"), [(64, 4), (100, 8), (13, 12), (600, 512), (7, 7), (35_983, 512)])
def test_rows_are_split_as_readers_split_them(num_rows, num_replicas):
    real = [each.num_rows for each in Split(num_replicas).replicas(num_rows)]
    part = split_rows(num_rows, num_replicas)
    rest = [part["rest"]] if part["rest"] else []
    assert real == [part["rows"]] * part["full"] + rest + [0] * part["empty"]


def test_what_a_ring_sends():
    """In each of 2 (N - 1) steps a device sends an N-th of a sum, and in each of N - 1 what one device has."""
    sent = StepBytes(gradients=4000, statistics=800, gathered=60, num_gatherings=2, metrics=40)
    for count in (2, 4, 8):
        steps = range(2 * (count - 1))
        ring = sent.in_ring(count)
        assert ring["gradients"] == sum(4000 // count for _ in steps)
        assert ring["batch_norm"] == sum(800 // count for _ in steps) + sum(60 for _ in range(count - 1))
    assert sum(sent.in_ring(1).values()) == 0
    by_sums = dataclasses.replace(sent, gathers_by_sums=True, statistics=0)
    assert by_sums.in_ring(4)["batch_norm"] == 2 * 3 * 60


def config(**settings):
    return kerasdp.Config(dry_run=True, **settings)


def test_data_is_known_without_being_read(tmp_path):
    known = load_data(config(dataset="cifar10"))
    assert (known.train.num_samples, known.test.num_samples) == (50_000, 10_000)
    assert (known.input_shape, known.num_classes) == ((32, 32, 3), 10)
    assert known.train.inputs(np.arange(3)).shape == (3, 32, 32, 3)
    away = load_data(config(dataset="images(size=(64,48))", data_dir=str(tmp_path / "away")))
    assert (away.input_shape, away.num_classes, away.train.is_counted) == ((64, 48, 3), 1000, False)
    assert "away is not here" in away.train.note
    digits = load_data(config())
    assert not isinstance(digits.train, datasets.StandIn)
    assert digits.train.num_samples == 1437


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dataset": "synthetic(colour=3)"}, "synthetic does not take these arguments"),
        ({"dataset": "mnist(size=3)"}, "mnist does not take these arguments"),
        ({"dataset": "nowhere.py:load"}, "there is no file 'nowhere.py'"),
        (
            {"dataset": "tests.hosts.test_dry_run:away"},
            "away cannot be loaded here .FileNotFoundError: .*num_samples=1281167",
        ),
    ],
)
def test_wrong_data_sets_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        load_data(config(**settings))


def away():
    raise FileNotFoundError("/cluster/data.npz")
