"""Who hears of a step, and who makes numbers of its logs."""

import keras
import numpy as np

import kerasdp
from kerasdp.checkpoint import files


class Validation(keras.callbacks.Callback):
    """Evaluates by itself, and writes into the logs, as user-defined callbacks do; hears of steps by the older name."""

    heard = 0

    def on_batch_end(self, batch, logs=None):
        self.heard += logs["loss"] > 0

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = (3.0, 1.0, 2.0)[epoch]


def test_what_a_callback_adds_to_the_logs_decides_which_checkpoint_is_best(tmp_path):
    def train(runner):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        own = Validation()
        runner.fit(model, np.ones((8, 2)), 3 * np.ones((8, 1)), epochs=3, callbacks=[own], verbose=0)
        return own.heard

    settings = {"backend": keras.backend.backend(), "device": "cpu", "num_devices": 1, "verbose": 0}
    assert kerasdp.launch(train, **settings, workdir=str(tmp_path)) == 3
    best = files.load(str(tmp_path / "checkpoints" / "best.safetensors"))
    assert best.state["epoch"] == 2 and best.state["best"] == {"name": "val_loss", "score": 1.0}
