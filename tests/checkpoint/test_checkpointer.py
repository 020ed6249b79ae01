"""When a checkpoint is written."""

import os
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from kerasdp.checkpoint import checkpointer as module
from kerasdp.checkpoint import files
from kerasdp.checkpoint.checkpointer import Checkpointer
from kerasdp.config import Config
from kerasdp.contract import SingleProcess
from kerasdp.processes import signals
from kerasdp.reporting.recorder import Recorder
from kerasdp.run_state import RunState
from tests.reporting.test_report import facts


@pytest.fixture
def make(tmp_path):
    made = []

    def make(callbacks=(), **choices):
        config = Config(backend=keras.backend.backend(), workdir=str(tmp_path), **({"keep": 9} | choices))
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.25), "mse")
        model.optimizer.build(model.trainable_variables)
        model.stop_training = False
        state = RunState()
        state.begin_fit(batch_size=4, num_batches=5, epochs=4)
        state.begin_epoch(0)
        strategy = SimpleNamespace(
            processes=SingleProcess(), num_devices=1,
            read=lambda model, variables, take: list(map(take, variables)) if take else [],
        )  # fmt: skip
        reader = SimpleNamespace(saved_state=lambda epoch, batch: {"digest": str(batch)})
        recorder = Recorder(state, facts(tmp_path, config=config), strategy, folder=None)
        recorder.set_model(model)
        parts = config, strategy, state, model, reader, recorder, list(callbacks)
        one = Checkpointer(*parts, identity={}, folder=str(tmp_path / "checkpoints"), resumed=None)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
    with signals.noticed():  # forgets a signal of the test
        pass


def step(checkpointer, number=1):
    """A call of the step function, of `number` steps."""
    for _ in range(number):
        checkpointer.run_state.after_step(0.5, np.arange(4), {}, 0.5)
    checkpointer.after_step()
    checkpointer.writer.wait()


def end_epoch(checkpointer, **logs):
    checkpointer.run_state.stop_clock()
    checkpointer.after_epoch(logs)
    checkpointer.run_state.end_epoch()
    checkpointer.run_state.begin_epoch(checkpointer.run_state.epoch + 1)
    checkpointer.writer.wait()


def saved_steps(checkpointer):
    return sorted(files.load(path).state["step"] for path in files.paths_in(checkpointer.folder))


def test_every_number_of_steps(make):
    checkpointer = make(checkpoint_every="2")
    for _ in range(5):
        step(checkpointer)
    assert saved_steps(checkpointer) == [2, 4]


def test_every_epoch(make):
    checkpointer = make(checkpoint_every="epoch")
    for _ in range(5):
        step(checkpointer)
    assert saved_steps(checkpointer) == []
    end_epoch(checkpointer, loss=1.0)
    (path,) = files.paths_in(checkpointer.folder)
    state = files.load(path).state
    assert (state["step"], state["epoch"], state["batch"], state["data"]) == (5, 1, 0, {"digest": "0"})


def test_every_minute(make, monkeypatch):
    checkpointer = make(checkpoint_every="1m")
    now = checkpointer._last_time
    for seconds in (59, 61, 100, 122):
        monkeypatch.setattr(module.time, "monotonic", lambda seconds=seconds: now + seconds)
        step(checkpointer)
    assert saved_steps(checkpointer) == [2, 4]


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([{"loss": 3.0}, {"loss": 4.0}], 1),
        ([{"loss": 1.0}, {"loss": 1.0, "val_loss": 5.0}, {"loss": 0.5}], 2),  # a validation counts for more
        ([{"loss": 2.0}, {"loss": float("nan")}], 1),
    ],
)
def test_the_best_epoch(scores, best, make):
    checkpointer = make(checkpoint_every="epoch")
    for logs in scores:
        step(checkpointer)
        end_epoch(checkpointer, **logs)
    found = files.load(os.path.join(checkpointer.folder, "best.safetensors"))
    assert found.state["step"] == best
    assert saved_steps(checkpointer) == list(range(1, len(scores) + 1))


def test_what_callbacks_lose_is_named_once(make, capsys):
    class Own(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.function, self.count, self.by_step = print, 0, {}

        def on_train_begin(self, logs=None):
            self.file = object()

    own = Own()
    checkpointer = make([own, keras.callbacks.CSVLogger("unused")], checkpoint_every="1")
    own.on_train_begin()
    checkpointer.restore_callbacks()
    own.count, own.by_step[1] = 1, 0.5
    step(checkpointer)
    assert capsys.readouterr().err == ""
    own.by_step[2], own.function = object(), repr
    for _ in range(2):
        step(checkpointer)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: checkpoints do not contain Own.by_step, Own.function, which changed during training; store the"
    )
