"""Trains by steps that change something, or nothing, and tell their loss in their logs alone.

python unchanged.py BACKEND NUM_DEVICES [SETTINGS]: with settings (JSON, of `kerasdp.launch`), one user-defined step
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


def train_others(runner):
    import keras

    class AnyLarge(keras.metrics.Metric):
        """Whether an output was large: no number."""

        def __init__(self):
            super().__init__(name="any_large")
            self.seen = self.add_variable((), "zeros", "bool")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.assign(keras.ops.logical_or(self.seen, keras.ops.any(keras.ops.abs(y_pred) > 1e-3)))

        def result(self):
            return keras.ops.cast(self.seen, "float32")

    def fit(name, optimizer, *, batch_norm=False, frozen=True):
        norm = [keras.layers.BatchNormalization(center=False, scale=False)] * batch_norm
        model = keras.Sequential([keras.Input((4,)), *norm, keras.layers.Dense(1, trainable=not frozen)], name=name)
        model.compile(optimizer, "mse", metrics=[AnyLarge()])
        assert model.fit(X, Y, batch_size=4, epochs=2).history["any_large"] == [1.0, 1.0]

    sgd, warmup = (
        keras.optimizers.SGD,
        keras.optimizers.schedules.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=9),
    )
    fit("all_frozen", sgd())
    fit("batch_norm_alone", sgd(), batch_norm=True)
    fit("no_rate", sgd(0.0), frozen=False)
    fit("accumulated", sgd(gradient_accumulation_steps=6), frozen=False)
    fit("warmed_up", sgd(warmup), frozen=False)
    model, optimizer = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), sgd()
    optimizer.build(model.trainable_variables)

    @runner.step
    def zero_step(batch):
        x, y = batch
        compute = kerasdp.value_and_grad(lambda: keras.ops.mean((model(x) - y) ** 2), model.trainable_variables)
        loss, gradients = compute()
        optimizer.apply([0.0 * gradient for gradient in gradients], model.trainable_variables)
        return loss

    for batch in runner.batches(X, Y, batch_size=4):
        zero_step(batch)


def train(others, runner):
    found = {name: told(name) for name in (("trains", "flat") if others else ("trains",))}
    if others:
        train_others(runner)
    return found


if __name__ == "__main__":
    backend, count, *settings = sys.argv[1:]
    choices = json.loads(settings[0]) if settings else {}
    printed(functools.partial(train, not settings), backend, count, precision="float64", **choices)
