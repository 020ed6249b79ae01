"""Trains a model with one `train_step(self, data)` by Keras' own `fit`, without any run."""

import json

import keras
import numpy as np
from keras import ops

import kerasdp


def numbers(seed, *shape):
    return np.random.RandomState(seed).randn(*shape).astype("float32")


class Two(keras.Model):
    """Two parts, each with an optimizer; Keras knows that of `compile`."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        )
        self.last = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.other, self.of_loss = keras.optimizers.Adam(0.01), keras.metrics.Mean(name="loss")
        self.built = True  # as Keras asks of a model without `call`

    @property
    def metrics(self):
        return [self.of_loss]

    @kerasdp.portable_step
    def train_step(self, data):
        x, y = data
        weights = [part.trainable_variables for part in (self.first, self.last)]
        loss, gradients = kerasdp.value_and_grad(lambda: self.error_of(x, y, training=True), weights)()
        self.optimizer.apply(gradients[0], weights[0])
        self.other.apply(gradients[1], weights[1])
        self.of_loss.update_state(loss)
        return {"loss": self.of_loss.result()}

    @kerasdp.portable_step
    def test_step(self, data):
        self.of_loss.update_state(self.error_of(*data, training=False))
        return {"loss": self.of_loss.result()}

    @kerasdp.portable_step
    def predict_step(self, data):
        return self.last(self.first(data[0] if isinstance(data, tuple) else data))

    def error_of(self, x, y, training):
        return ops.mean(ops.square(self.last(self.first(x, training=training)) - y))


def fitted(names_slots):
    model = Two()
    for place, weight in enumerate(model.weights):
        if not weight.path.endswith(("variance", "gamma")):
            weight.assign(0.5 * numbers(place, *weight.shape))
    model.compile(keras.optimizers.SGD(0.05))
    model.optimizer.build(model.first.trainable_variables)
    model.other.build(model.last.trainable_variables)
    if names_slots:
        model.slots = model.other.variables
    x, y = numbers(50, 64, 4), numbers(51, 64, 1)
    history = model.fit(x, y, epochs=4, batch_size=16, shuffle=False, verbose=0, validation_data=(x, y)).history
    return model, history["loss"] + history["val_loss"], model.predict(x[:3], verbose=0)


def main():
    model, losses, predicted = fitted(names_slots=True)
    found = {"losses": losses, "predicted": predicted.tolist(), "steps": int(model.other.iterations), "forgotten": ""}
    try:
        fitted(names_slots=False)
    except kerasdp.UserError as error:
        found["forgotten"] = str(error)
    print("RESULT " + json.dumps(found))


main()
