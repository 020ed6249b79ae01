"""Trains nets in two stages that have something unusual, and by plain Keras, and prints the losses of both.

python unusual_stages.py
"""

import numpy as np
from starting import printed


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


def nothing_decays(keras):
    """In the first stage."""
    model = net(keras, keras.layers.Dense(8, "tanh", name="first"))
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=20.0)
    optimizer.exclude_from_weight_decay(var_list=model.get_layer("first").weights)
    return model, optimizer


def with_a_class(keras):
    """Beside the number that is learned, a whole number, which has no gradient."""
    inputs = keras.Input((8,))
    x = keras.layers.Dense(8, "tanh", name="first")(inputs)
    x = keras.layers.Dense(2, name="second")(x)
    model = keras.Model(inputs, {"number": x[:, :1], "class": keras.ops.argmax(x, axis=-1)})
    return model, keras.optimizers.Adam(0.01)


def two_models(keras, runner, x):
    """One beside the other, in turns: each keeps its stages."""
    pair = [net(keras, keras.layers.Dense(8, "tanh", name="first")) for _ in range(2)]
    losses = []
    for model in pair:
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.set_weights([np.full(weight.shape, 0.1, "float32") for weight in model.weights])
    for model in (pair[0], pair[1], pair[0], pair[1]):
        losses.append(runner.fit(model, x, x[:, :1], shuffle=False, verbose=0).history["loss"])
        runner.predict(pair[0], x)
    return losses[::2], losses[1::2], 6


def train(runner):
    import keras

    x = np.random.RandomState(0).randn(32, 8).astype("float32")
    choices = {"epochs": 3, "shuffle": False, "verbose": 0}
    results = {}
    for make in (frozen, without_weights, spared, nothing_decays, with_a_class):
        (model, optimizer), (plain, other) = make(keras), make(keras)
        loss, y = "mse", x[:, :1]
        if make is with_a_class:
            loss, y = {"number": "mse", "class": None}, {"number": y}
        model.compile(optimizer, loss)
        plain.compile(other, loss)
        plain.set_weights(model.get_weights())
        in_stages = runner.fit(model, x, y, **choices).history["loss"]
        by_keras = plain.fit(x, y, batch_size=16, **choices).history["loss"]
        results[make.__name__] = in_stages, by_keras, int(optimizer.iterations)
    results["two_models"] = two_models(keras, runner, x)
    return results


if __name__ == "__main__":
    printed(train, "torch", 2, strategy="pipeline", cut_at="first", batch_size=16)
