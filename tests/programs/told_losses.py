"""Trains by user-defined steps that tell their loss in their logs alone.

python told_losses.py BACKEND NUM_DEVICES [SETTINGS]; with settings (JSON, of `kerasdp.launch`) by one, else by two
"""

import functools
import json
import sys

import numpy as np
from starting import printed

import kerasdp

X = np.random.RandomState(0).normal(size=(32, 4))
Y = X.sum(1, keepdims=True)


def own_model(name):
    import keras

    class Own(keras.Model):
        def __init__(self):
            super().__init__(name=name)
            self.net = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])

        def call(self, x):
            return self.net(x)

        def loss_of(self, data, training):
            x, y = data
            return keras.ops.mean((self.net(x, training=training) - y) ** 2)

        def train_step(self, data):
            weights = self.net.trainable_weights
            loss, gradients = kerasdp.value_and_grad(functools.partial(self.loss_of, data, True), weights)()
            if name == "trains":
                self.optimizer.apply(gradients, weights)
            return {"loss": loss}

        def test_step(self, data):
            return {"loss": self.loss_of(data, False)}

    model = Own()
    model.compile("sgd")
    return model


def told(name):
    """The history of a step, and the losses of its batches."""
    import keras

    model, seen = own_model(name), []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"])))
    history = model.fit(
        X, Y, batch_size=12, epochs=3, validation_data=(X, Y), validation_batch_size=12, callbacks=[callback]
    )
    rows = [(X[first : first + 12], Y[first : first + 12]) for first in (0, 12, 24)]
    validated = [model.evaluate(*each, batch_size=12) for each in rows]
    return {"history": history.history, "batches": seen, "validated": validated}


def train(names, runner):
    return {name: told(name) for name in names}


if __name__ == "__main__":
    backend, count, *settings = sys.argv[1:]
    choices = json.loads(settings[0]) if settings else {}
    names = ("trains",) if settings else ("trains", "flat")
    printed(functools.partial(train, names), backend, count, precision="float64", **choices)
