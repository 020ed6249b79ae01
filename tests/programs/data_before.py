"""Trains on a tf.data data set that was made before `launch`, and on one that `train` makes; the first is told."""

import json

import keras
import numpy as np
import tensorflow as tf

import kerasdp


def make():
    return tf.data.Dataset.from_tensor_slices((np.ones((4, 3), "float32"), np.ones((4, 1), "float32"))).batch(2)


data = make()


def train(runner):
    return [float(sum(len(x) for x, _ in data))]


def train_on_its_own(runner):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(make(), verbose=0)


settings = {"backend": "torch", "num_devices": 1, "device": "cpu", "verbose": 0}
kerasdp.launch(train_on_its_own, **settings)
print("RESULT " + json.dumps(kerasdp.launch(train, **settings)))
