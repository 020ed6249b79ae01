"""The order of a run's callbacks changes neither its files nor what a resumed run does."""

import dataclasses
import itertools
import json

import keras
import numpy as np
import pytest

from kerasdp.backends.base import SingleProcess, StepFunctions, Trained
from kerasdp.checkpoint import files
from kerasdp.config import Config
from kerasdp.data.batch import Feed, SampleReader
from kerasdp.data.sampling import Order, Split
from kerasdp.data.sources import ArraySource
from kerasdp.errors import NonFiniteLossError
from kerasdp.reporting.report import Facts
from kerasdp.runtime import signals
from kerasdp.runtime.run_state import RunState
from kerasdp.training.callbacks import RunCallbacks
from kerasdp.training.loop import Loop

X, Y = np.arange(40.0, dtype="float32").reshape(20, 2), np.arange(20)
NUM_BATCHES, EPOCHS = 5, 3


class OneDevice:
    """As much of a `Strategy` as callbacks ask for."""

    processes, stages, num_devices, split, splits_batches = SingleProcess(), None, 1, Split(1), False
    training_split = Split(1)

    def gather_variables(self, model):
        pass

    def read(self, model, variables, take):
        return [take(variable) for variable in variables] if take else []

    def set_training(self, model, is_training):
        pass

    def description(self, model):
        return ""

    def peak_memory_bytes(self):
        return 1


class SumOfBatches(keras.callbacks.Callback):
    """A callback with state, which each part of a run must find as it was."""

    total = 0

    def on_train_begin(self, logs=None):
        self.total = 0

    def on_train_batch_end(self, batch, logs=None):
        self.total += batch


def new_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def train(folder, order, *, stop_at=None, resume=False, nan_at=None, extra=()):
    """Trains a model whose step adds the mean of a batch to its weights."""
    config = Config(backend="jax", workdir=str(folder), resume=resume, checkpoint_every="2", log_every=2, batch_size=4)
    config = dataclasses.replace(config, max_steps=stop_at)
    model, state, batches = new_model(), RunState(), []
    source_order = Order(num_samples=20, batch_size=4, seed=1)
    feed = Feed(SampleReader(ArraySource(X, Y), source_order, Split(1), (0, 1)), lambda batch: batch, state)
    state.begin_fit(batch_size=4, num_batches=NUM_BATCHES, epochs=EPOCHS, max_steps=config.max_steps)
    facts = Facts(
        config=config, devices="one", device_kind="cpu", num_devices=1, num_replicas=1, num_processes=1, model="m",
        global_batch_size=4,
    )  # fmt: skip
    callbacks = RunCallbacks(
        config, OneDevice(), state, model, feed.reader, [SumOfBatches(), *extra], facts=facts, fit=1, verbose=2,
    )  # fmt: skip
    callbacks.callbacks = [callbacks.callbacks[place] for place in order]

    def train_step(batch, detail):
        batches.append(batch.indices.tolist())
        kernel = model.layers[0].kernel
        kernel.assign_add(np.full((2, 1), batch.inputs.mean()))
        loss = float("nan") if state.step + 1 == nan_at else float(keras.ops.sum(kernel))
        model.metrics[0].update_state(loss)
        return Trained(loss, 0.5, {"loss": loss}, {})

    functions = StepFunctions(train=train_step, test=None, predict=None)
    try:
        Loop(model, OneDevice(), state, functions).fit(feed, callbacks, range(state.epoch, EPOCHS), None, 1)
    finally:
        callbacks.close()
    total = next(callback.total for callback in callbacks.callbacks if isinstance(callback, SumOfBatches))
    return {"batches": batches, "total": total, "weights": model.get_weights()[0].tolist()}


def left_in(folder):
    """The files of a run without what the clock says."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    newest = files.load(files.paths_in(folder / "checkpoints")[0])
    return {
        "steps": [(line["step"], line["epoch"], line["loss"], line["learning_rate"]) for line in lines],
        "history": [row.split(",")[:2] for row in (folder / "history.csv").read_text().splitlines()],
        "result": json.loads((folder / "report.json").read_text())["final"],
        "place": [newest.state[name] for name in ("step", "epoch", "batch", "stopped", "best", "callbacks")],
        "in the checkpoint": [newest.state["recorder"][name] for name in ("images", "last_logs")],
        "rows in the checkpoint": [row["loss"] for row in newest.state["recorder"]["history"]],
        "arrays": {name: array.tolist() for name, array in newest.arrays.items()},
    }


# Recorder, Progress, the user's, History.
USUAL = (0, 1, 2, 3)
ORDERS = list(itertools.permutations(USUAL))[5::6]


@pytest.fixture(scope="module", autouse=True)
def without_signals():
    with signals.noticed():  # forgets those of other tests
        pass


@pytest.fixture(scope="module")
def usual(without_signals, tmp_path_factory):
    folder = tmp_path_factory.mktemp("usual") / "run"
    return train(folder, USUAL), left_in(folder)


@pytest.mark.parametrize(
    "order", [ORDERS[0], USUAL[::-1], *(pytest.param(each, marks=pytest.mark.proof) for each in ORDERS[1:])], ids=str
)
def test_the_same_files_and_the_same_resumed_run(order, usual, tmp_path):
    result, found = usual
    assert train(tmp_path / "whole", order) == result
    assert left_in(tmp_path / "whole") == found
    first = train(tmp_path / "resumed", order, stop_at=8)
    assert left_in(tmp_path / "resumed")["place"][:3] == [8, 1, 3]
    second = train(tmp_path / "resumed", order, resume=True)
    assert first["batches"] + second["batches"] == result["batches"]
    assert (second["total"], second["weights"]) == (result["total"], result["weights"])
    assert left_in(tmp_path / "resumed") == found


@pytest.mark.parametrize("order", [USUAL, USUAL[::-1]], ids=str)
def test_a_loss_that_is_not_a_number_is_in_no_checkpoint(order, tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"the loss became nan at step 4 \(epoch 1\) with learning rate 0.5"):
        train(tmp_path / "run", order, nan_at=4)
    assert [path[-20:] for path in files.paths_in(tmp_path / "run" / "checkpoints")] == ["00000002.safetensors"]


class Validation(keras.callbacks.Callback):
    """Evaluates by itself, and writes into the logs, as user-defined callbacks do."""

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = (3.0, 1.0, 2.0)[epoch]


def test_what_a_callback_adds_to_the_logs_decides_which_checkpoint_is_best(tmp_path):
    train(tmp_path / "run", (0, 1, 2, 3, 4), extra=[Validation()])
    best = files.load(str(tmp_path / "run" / "checkpoints" / "best.safetensors"))
    assert best.state["epoch"] == 2
    assert best.state["best"] == {"name": "val_loss", "score": 1.0}
