"""Models and data of the user's own that need care on several devices: what each gives, or why it is refused.

python own_code.py BACKEND NUM_DEVICES
"""

import json
import sys

import numpy as np

import kerasdp

X, Y = np.random.RandomState(0).randn(24, 4).astype("float32"), np.arange(24) % 3


def train(runner):
    cases = (own_train_step, add_loss, own_batch_norm, layer_made_before, batches, recompiled, plain, own_loss)
    return {case.__name__: outcome(case, runner) for case in cases}


def outcome(case, runner):
    try:
        return case(runner)
    except kerasdp.UserError as error:
        return str(error)


def compiled(runner, build):
    import keras

    with runner.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def dense(extra=()):
    import keras

    return keras.Sequential([keras.Input((4,)), *extra, keras.layers.Dense(3)])


def fit(runner, model, *args, **kwargs):
    return runner.fit(model, *args, batch_size=8, epochs=2, verbose=0, **kwargs).history["loss"]


def own_train_step(runner):
    import keras

    class Model(keras.Sequential):
        def train_step(self, *args):
            self.seen = True
            return super().train_step(*args)

    return fit(runner, compiled(runner, lambda: Model([keras.Input((4,)), keras.layers.Dense(3)])), X, Y)


def own_loss(runner):
    """A loss that keeps a variable of its own, as the centre of DINO."""
    import keras
    from keras import ops

    class Centred(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.centre = keras.Variable(np.zeros(3, "float32"), trainable=False, name="centre")

        def call(self, y_true, y_pred):
            loss = ops.mean(ops.square(y_pred - self.centre), -1)
            self.centre.assign(0.9 * self.centre + 0.1 * ops.mean(y_pred, 0))
            return loss

    with runner.scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1), Centred())
    return fit(runner, model, X, Y)


def add_loss(runner):
    import keras

    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    return fit(runner, compiled(runner, lambda: dense([Penalty(name="penalty")])), X, Y)


def own_batch_norm(runner):
    import keras

    class Norm(keras.layers.BatchNormalization):
        pass

    return fit(runner, compiled(runner, lambda: dense([Norm(name="norm")])), X, Y)


def layer_made_before(runner):
    """Its seed is made outside of `runner.scope()`, and is on all devices nevertheless."""
    import keras

    dropout = keras.layers.Dropout(0.5, seed=3)
    return fit(runner, compiled(runner, lambda: dense([dropout])), X, Y)


def batches(runner):
    model = compiled(runner, dense)
    return fit(runner, model, Again([(X[i : i + 7], Y[i : i + 7]) for i in range(0, 24, 7)]))


class Again:
    """Batches that can be iterated anew each epoch."""

    def __init__(self, batches):
        self.items = batches

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)


def recompiled(runner):
    """A second `compile` takes effect: other optimizer, other loss."""
    model = compiled(runner, dense)
    first = fit(runner, model, X, Y)
    with runner.scope():
        model.compile("adam", "mse")
    return first + fit(runner, model, X, np.eye(3)[Y])


def plain(runner):
    """After the runner's work the model is a plain Keras model again, with Keras' own step functions."""
    model = compiled(runner, dense)
    losses = fit(runner, model, X, Y)
    assert not {"train_function", "test_function", "_symbolic_build", "call"} & {
        name for name, value in vars(model).items() if value is not None
    }
    return losses


if __name__ == "__main__":
    backend, num_devices = sys.argv[1:]
    result = kerasdp.launch(train, backend=backend, num_devices=int(num_devices), device="cpu", verbose=0)
    print("RESULT " + json.dumps(result))
