"""Trains a small model with dropout, batch norm and callbacks that hold state; prints what came out.

python resume.py SETTINGS: fields of kerasdp.Config as JSON, and
    epochs, optimizer, learning_rate: of the training
    trouble, at_step: what happens on the last rank behind a step, once in a workdir: "signal", "signal in validation",
        "kill", "nan", "remove" (the workdir)
    export: a file for the model that was trained
    steps_per_execution: of Keras' `compile`; units: of the last layer but one
"""

import json
import os
import pathlib
import shutil
import signal
import sys

import numpy as np

import kerasdp

OWN = ("epochs", "optimizer", "learning_rate", "trouble", "at_step", "units", "export", "steps_per_execution")
SETTINGS = json.loads(os.environ["KERASDP_TEST_SETTINGS"]) if "KERASDP_TEST_SETTINGS" in os.environ else {}


def train(runner):
    import keras
    from keras import layers
    from learn_classes import digest_of

    x = np.random.RandomState(0).randn(150, 6).astype("float32")
    y = (x[:, 0] + x[:, 1] ** 2 > 1).astype("int32") + (x[:, 2] > 0)
    with runner.scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(24), layers.BatchNormalization(), layers.Activation("gelu"),
             layers.Dropout(0.3), layers.Dense(SETTINGS.get("units", 16), "gelu"), layers.Dense(3)]
        )  # fmt: skip
        model.compile(
            kerasdp.make_optimizer(SETTINGS.get("optimizer", "sgd"), SETTINGS.get("learning_rate")),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=SETTINGS.get("steps_per_execution", 1),
        )
    if runner.config.backend == "jax" and model.steps_per_execution > 1:  # as on GPUs: in one program
        layout = runner.strategy.layout()
        assert layout.is_on_cpu
        layout.is_on_cpu = False
        runner.strategy.layout = lambda: layout
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.3),
        keras.callbacks.EarlyStopping("val_loss", patience=50, restore_best_weights=True),
        trouble(keras, runner),
    ]
    history = runner.fit(model, x, y, epochs=SETTINGS["epochs"], validation_split=0.2, callbacks=callbacks)
    if "export" in SETTINGS:
        kerasdp.export(model, SETTINGS["export"])
    return {
        "weights": digest_of(model),
        "history": history.history,
        "best": float(callbacks[1].best),
        "waited": callbacks[1].wait,
        "outputs": runner.predict(model, x[:5]).tolist(),
    }


def trouble(keras, runner):
    class Trouble(keras.callbacks.Callback):
        num_steps = 0

        def on_train_begin(self, logs=None):
            self.num_steps = 0  # as callbacks do; the checkpoint must win

        def on_train_batch_end(self, batch, logs=None):
            self.num_steps += 1
            if SETTINGS.get("trouble") != "signal in validation":
                self.trouble()

        def on_test_batch_end(self, batch, logs=None):
            if SETTINGS.get("trouble") == "signal in validation" and batch == 1:
                self.trouble()

        def trouble(self):
            is_last = runner.strategy.processes.rank == runner.strategy.processes.num_processes - 1
            if not is_last or "trouble" not in SETTINGS or self.num_steps != SETTINGS["at_step"]:
                return
            mark = pathlib.Path(f"{runner.config.workdir}.trouble")
            if mark.exists():
                return
            mark.touch()
            make_trouble(self.model, runner.config.workdir)

    return Trouble()


def make_trouble(model, workdir):
    kind = SETTINGS["trouble"]
    if kind.startswith("signal"):
        os.kill(os.getpid(), signal.SIGUSR1)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "nan":
        model.optimizer.learning_rate = float("nan")
    elif kind == "remove":
        shutil.rmtree(workdir)


def main():
    settings = json.loads(sys.argv[1])
    os.environ["KERASDP_TEST_SETTINGS"] = sys.argv[1]
    globals()["SETTINGS"] = settings
    fields = {name: value for name, value in settings.items() if name not in OWN}
    fields = {"device": "cpu", "verbose": 0, "log_every": 1, "batch_size": 13} | fields
    print("RESULT", json.dumps(kerasdp.launch(train, kerasdp.Config(**fields))))


if __name__ == "__main__":
    main()
