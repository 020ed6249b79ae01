"""Trains a small model around every layer of keras_layers.py that has weights or draws: each_layer.py BACKEND DEVICES.

Prints, for each layer, the losses of three steps in float64, or in a line why it is refused.
"""

import sys

import numpy as np
from keras_layers import LAYERS
from starting import printed

ROWS = 6


def learned(runner, make, shapes):
    import keras

    is_one = isinstance(shapes, tuple) and not isinstance(shapes[0], tuple)
    layer = make()
    is_index = "Embedding" in type(layer).__name__
    inputs = [keras.Input(shape[1:], dtype="int32" if is_index else None) for shape in ([shapes] if is_one else shapes)]
    output = keras.tree.flatten(layer(inputs) if isinstance(shapes, list) else layer(*inputs))[0]
    output = keras.ops.mean(output, axis=1) if None in output.shape[1:] else output
    with runner.scope():
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(output)))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    random = np.random.RandomState(0)
    x = [random.randint(0, 90, (ROWS, *each.shape[1:])) if is_index else random.rand(ROWS, *each.shape[1:])
         for each in inputs]  # fmt: skip
    history = runner.fit(model, x if len(x) > 1 else x[0], random.rand(ROWS, 1), batch_size=ROWS, epochs=3, verbose=0)
    return history.history["loss"]


def train(runner):
    found = {}
    for name, (make, shapes) in LAYERS.items():
        try:
            found[name] = learned(runner, make, shapes)
        except Exception as error:  # of Keras, too: some layers take no such input
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return found


if __name__ == "__main__":
    printed(train, *sys.argv[1:], precision="float64")
