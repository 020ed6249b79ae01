"""What the cases of `any_model.py` share: their data, and a small model."""

import keras
import numpy as np

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(22, 4).astype("float32"), (np.arange(22) % 3).astype("int32")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def make(runner, build, optimizer=None, metrics=None):
    with runner.scope():
        model = build()
        compile_it(model, optimizer or keras.optimizers.SGD(0.1, momentum=0.9), metrics)
    return model


def compile_it(model, optimizer, metrics=None):
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)


def fit(runner, model, **kwargs):
    return runner.fit(model, X, Y, **({"batch_size": 7, "epochs": 2, "verbose": 0} | kwargs)).history["loss"]


def sums(model):
    """Of each weight: equal where the weights are, up to round-off."""
    return sorted(float(np.abs(keras.ops.convert_to_numpy(weight).astype("float64")).sum()) for weight in model.weights)


def mlp():
    layers = [
        keras.layers.Dense(8, "relu", name="first"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, name="last"),
    ]
    return keras.Sequential([keras.Input((4,)), *layers])
