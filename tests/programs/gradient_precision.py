"""Trains a small net on two devices, and prints the losses.

python gradient_precision.py BACKEND GRADIENT_PRECISION
"""

import json
import sys

import numpy as np

import kerasdp


def train(runner):
    import keras
    from learn_classes import StepLosses

    numbers = np.random.RandomState(0)
    x, y = numbers.randint(0, 20, (64, 6)), numbers.rand(64, 1).astype("float32")
    with runner.scope():
        inputs = keras.Input((6,), dtype="int32")
        hidden = keras.layers.Flatten()(keras.layers.Embedding(20, 8)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(16, "gelu")(hidden)))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    losses = StepLosses(runner)
    runner.fit(model, x, y, epochs=3, callbacks=[losses])  # ends with a look at whether the replicas are bit-equal
    return losses.values


def main():
    backend, precision = sys.argv[1:]
    fields = {"num_devices": 2, "device": "cpu", "verbose": 0, "batch_size": 15}
    print("RESULT", json.dumps(kerasdp.launch(train, backend=backend, gradient_precision=precision, **fields)))


if __name__ == "__main__":
    main()
