"""Returns a model of a class of this script, and its history; prints both. The class may not say how it is made.

python returned.py BACKEND NUM_DEVICES FOLDER whole|without_config
"""

import json
import sys

import keras
import numpy as np

import kerasdp

backend, num_devices, folder, kind = sys.argv[1:]
X, Y = np.eye(8, dtype="float32"), np.arange(8) % 2


class Model(keras.Model):
    def __init__(self, units=3, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return self.dense(x)


class WithoutConfig(Model):
    def __init__(self, dense):
        super().__init__(2)
        self.dense = dense


def train(runner):
    class Loss(keras.losses.SparseCategoricalCrossentropy):  # which only this process knows
        pass

    model = WithoutConfig(keras.layers.Dense(2)) if kind == "without_config" else Model(2)
    model.compile("adam", Loss(from_logits=True))
    return {"model": model, "history": model.fit(X, Y, batch_size=4, epochs=2)}


settings = {"backend": backend, "num_devices": int(num_devices), "device": "cpu", "verbose": 0}
try:
    found = kerasdp.launch(train, **settings, workdir=folder)
except kerasdp.UserError as error:
    print("RESULT " + json.dumps(str(error)))
else:
    model, losses = found["model"], found["history"].history["loss"]
    assert type(model) is Model, type(model)
    assert type(model.loss).__name__ == "Loss"
    num_updates = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    print("RESULT " + json.dumps([losses, model.evaluate(X, Y, verbose=0), num_updates]))
