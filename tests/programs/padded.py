"""Trains a small residual net with zero padding, eagerly and compiled on torch, and prints what came out.

python padded.py
"""

import json

import numpy as np

import kerasdp


def net(keras):
    """Two blocks as those of ResNet: padding of its own before convolutions of its images and of features."""
    layers = keras.layers
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(6, 5, strides=2, use_bias=False)(layers.ZeroPadding2D(2)(inputs))
    x = layers.Activation("gelu")(layers.BatchNormalization()(x))
    y = layers.Conv2D(6, 3, use_bias=False)(layers.ZeroPadding2D(1)(x))
    x = layers.Activation("gelu")(layers.Add()([x, layers.BatchNormalization()(y)]))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def train(runner):
    import keras
    from learn_classes import StepLosses

    from kerasdp.backends.torch import compiled_step

    pads = []
    fold_padding = compiled_step.fold_padding

    def count(graph):
        return sum("constant_pad_nd" in str(node.target) for node in graph.nodes)

    def counted(graph):
        before = count(graph)
        fold_padding(graph)
        pads.append([before, count(graph)])

    compiled_step.fold_padding = counted
    with runner.scope():
        model = net(keras)
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    numbers = np.random.RandomState(0)
    x, y = numbers.rand(32, 12, 12, 3).astype("float32"), numbers.randint(0, 4, 32)
    losses = StepLosses(runner)
    runner.fit(model, x, y, epochs=3, callbacks=[losses])
    compiled_step.fold_padding = fold_padding
    return {"losses": losses.values, "pads": pads, "weights": [weight.tolist() for weight in model.get_weights()]}


def main():
    choices = {"backend": "torch", "device": "cpu", "num_devices": 1, "batch_size": 16, "verbose": 0}
    print("RESULT", json.dumps({mode: kerasdp.launch(train, compile=mode, **choices) for mode in ("off", "on")}))


if __name__ == "__main__":
    main()
