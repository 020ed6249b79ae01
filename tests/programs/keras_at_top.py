"""Imports Keras at its top, as most scripts do, and names no backend to the kit.

python keras_at_top.py NUM_DEVICES
"""

import json
import sys

import keras
import numpy as np

import kerasdp

X, Y = np.random.RandomState(0).randn(24, 4).astype("float32"), np.arange(24) % 3


def train(runner):
    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return runner.config.backend, runner.fit(model, X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]


if __name__ == "__main__":
    print("RESULT " + json.dumps(kerasdp.launch(train, num_devices=int(sys.argv[1]), device="cpu", verbose=0)))
