"""A small model for the tests of this folder."""

import keras
from keras import layers


def net(optimizer="sgd"):
    inputs = x = keras.Input((3,), name="x")
    for number in range(4):
        x = layers.Dense(4, name=f"layer{number}")(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer, "mse")
    return model
