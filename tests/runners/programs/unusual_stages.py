"""Trains nets in two stages that have something unusual, and by plain Keras, and prints the losses of both.

python unusual_stages.py BACKEND
"""

import json
import sys

import numpy as np

import kerasdp


def net(keras, first):
    inputs = keras.Input((8,))
    x = keras.layers.Dense(8, "tanh", bias_initializer="ones", name="second")(first(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def frozen(keras):
    """Nothing to train in the first stage; the optimizer counts the steps, and keeps a number for all weights."""
    model = net(keras, keras.layers.Dense(8, "tanh", trainable=False, name="first"))
    return model, keras.optimizers.Nadam(0.01)


def without_weights(keras):
    return net(keras, keras.layers.Rescaling(2.0, name="first")), keras.optimizers.Adam(0.01)


def spared(keras):
    """Some weights of each stage do not decay: what no configuration of an optimizer holds."""
    model = net(keras, keras.layers.Dense(8, "tanh", bias_initializer="ones", name="first"))
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=20.0)
    optimizer.exclude_from_weight_decay(var_list=[model.get_layer("second").kernel], var_names=["bias"])
    return model, optimizer


def train(runner):
    import keras

    x = np.random.RandomState(0).randn(32, 8).astype("float32")
    choices = {"epochs": 3, "shuffle": False, "verbose": 0}
    results = {}
    for make in (frozen, without_weights, spared):
        (model, optimizer), (plain, other) = make(keras), make(keras)
        model.compile(optimizer, "mse")
        plain.compile(other, "mse")
        plain.set_weights(model.get_weights())
        in_stages = runner.fit(model, x, x[:, :1], **choices).history["loss"]
        by_keras = plain.fit(x, x[:, :1], batch_size=16, **choices).history["loss"]
        results[make.__name__] = in_stages, by_keras, int(optimizer.iterations)
    return results


if __name__ == "__main__":
    choices = {"strategy": "pipeline", "cut_at": "first", "balance": "flops", "device": "cpu", "verbose": 0}
    print("RESULT", json.dumps(kerasdp.launch(train, backend=sys.argv[1], batch_size=16, **choices)))
