"""Who hears of a step, and who makes numbers of its logs."""

import keras
import numpy as np
import pytest

import kerasdp
from kerasdp.checkpoint import files
from kerasdp.training.callbacks import RunCallbacks


class OnDevice:
    """A value that says when it is waited for."""

    is_read = False

    def __float__(self):
        self.is_read = True
        return 0.0


def told(callback, event, logs):
    callbacks = RunCallbacks.__new__(RunCallbacks)
    callbacks.callbacks = [callback]
    callbacks._call_listening(event, 0, logs)


@pytest.mark.parametrize("name", ["on_train_batch_end", "on_batch_end"])
def test_callbacks_of_steps_hear(name):
    heard = []
    kind = type("Own", (keras.callbacks.Callback,), {name: lambda self, batch, logs=None: heard.append(logs)})
    told(kind(), "on_train_batch_end", {"loss": 1})
    assert heard == [{"loss": 1.0}]


@pytest.mark.parametrize("event", ["on_train_batch_end", "on_test_batch_end"])
def test_nobody_waits_for_those_who_do_not_listen(event):
    loss = OnDevice()
    told(keras.callbacks.EarlyStopping(), event, {"loss": loss})
    assert not loss.is_read


class Validation(keras.callbacks.Callback):
    """Evaluates by itself, and writes into the logs, as user-defined callbacks do."""

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = (3.0, 1.0, 2.0)[epoch]


def test_what_a_callback_adds_to_the_logs_decides_which_checkpoint_is_best(tmp_path):
    def train(runner):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        runner.fit(model, np.ones((8, 2)), np.ones((8, 1)), epochs=3, callbacks=[Validation()], verbose=0)

    settings = {"backend": keras.backend.backend(), "device": "cpu", "num_devices": 1, "verbose": 0}
    kerasdp.launch(train, **settings, workdir=str(tmp_path))
    best = files.load(str(tmp_path / "checkpoints" / "best.safetensors"))
    assert best.state["epoch"] == 2 and best.state["best"] == {"name": "val_loss", "score": 1.0}
