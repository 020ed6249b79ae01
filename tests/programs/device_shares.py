"""Trains a small net in several ways, one after the other, and prints what came out of each.

python device_shares.py BACKEND WAYS: a list of fields of kerasdp.Config, as JSON; "own_step": a user-defined train_step
"""

import json
import sys

import numpy as np

import kerasdp


def net(keras):
    """Batch norm, dropout, an activity penalty, and a loss that a layer adds."""
    layers = keras.layers

    class Spread(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(inputs)))
            return inputs

    inputs = keras.Input((8, 8, 3))
    x = layers.BatchNormalization()(layers.Conv2D(6, 3)(inputs))
    x = layers.Dropout(0.3)(layers.Activation("gelu")(x))
    x = Spread()(layers.GlobalAveragePooling2D()(x))
    x = layers.Dense(8, "gelu", activity_regularizer=keras.regularizers.L2(0.01))(x)
    return inputs, layers.Dense(4)(x)


def train(runner, is_own_step):
    import keras
    from learn_classes import MaximumLogit, StepLosses

    class OwnStep(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    numbers = np.random.RandomState(0)
    x, y = numbers.rand(45, 8, 8, 3).astype("float32"), numbers.randint(0, 4, 45)
    weights = None if is_own_step else numbers.rand(45).astype("float32")
    with runner.scope():
        if is_own_step:  # what a step of one's own computes must be means over rows
            inputs = keras.Input((8, 8, 3))
            hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(8, "gelu")(keras.layers.Flatten()(inputs)))
            model = OwnStep(inputs, keras.layers.Dense(4)(hidden))
        else:
            model = keras.Model(*net(keras))
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", *([] if is_own_step else [MaximumLogit()])],
        )
    losses = StepLosses(runner)
    validation = None if is_own_step else (x[:21], y[:21])
    history = runner.fit(model, x, y, sample_weight=weights, epochs=3, callbacks=[losses], validation_data=validation)
    return {
        "losses": losses.values,
        "history": history.history,
        "evaluate": runner.evaluate(model, x[:19], y[:19], return_dict=True),
        "predictions": runner.predict(model, x[:19]).tolist(),
        "weights": np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist(),
        "shares": runner.strategy.split.shares,
        "first": [each.num_rows for each in runner.strategy.split.replicas(15)],
    }


def main():
    backend, ways = sys.argv[1], json.loads(sys.argv[2])
    results = []
    for way in ways:
        is_own_step = way.pop("own_step", False)
        fields = {"backend": backend, "device": "cpu", "batch_size": 15, "verbose": 0} | way
        results.append(kerasdp.launch(lambda runner, own=is_own_step: train(runner, own), **fields))
    print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
