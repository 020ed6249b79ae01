"""Who hears of a step, and who makes numbers of its logs."""

import keras
import pytest

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
