"""Trains models whose layers add losses (`add_loss`), or keep what they see, in Keras' own steps."""

import chosen_backend  # noqa: F401
import keras
import numpy as np
from keras import layers, ops
from own_steps_base import BATCH, ROWS, fitted, main, numbers


def vae(runner):
    """A layer that samples and adds a mean over rows; no targets, no loss but what is added and an output's."""

    class Sampling(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seed_generator = keras.random.SeedGenerator(3)

        def call(self, parts):
            mean, spread = parts
            apart = -0.5 * ops.sum(1 + spread - ops.square(mean) - ops.exp(spread), axis=-1)
            self.add_loss(0.1 * ops.mean(apart))
            noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator)
            return mean + ops.exp(0.5 * spread) * noise

    class Reconstruction(layers.Layer):
        def call(self, parts):
            self.add_loss([ops.mean(ops.square(parts[0] - parts[1])), 0.5 * ops.mean(ops.abs(parts[1]))])
            return parts[1]

    with runner.scope():
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, "relu", activity_regularizer="l2")(inputs)
        hidden = layers.BatchNormalization()(hidden)
        code = Sampling(name="sampling")([layers.Dense(2, name="mean")(hidden), layers.Dense(2, name="spread")(hidden)])
        model = keras.Model(inputs, Reconstruction(name="error")([inputs, layers.Dense(4)(code)]))
        model.compile(keras.optimizers.Adam(0.01))
    return evaluated(runner, model, numbers(0, ROWS, 4))


def sums(runner):
    """A subclassed model that adds a sum over the rows and a penalty of weights, and weighs them in `compute_loss`."""

    class Regularized(layers.Layer):
        """Has an activity regularizer of its own, and adds a loss as well."""

        def __init__(self, **kwargs):
            super().__init__(activity_regularizer=keras.regularizers.L1(0.01), **kwargs)
            self.dense = layers.Dense(5, "tanh")

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            outputs = self.dense(x)
            self.add_loss(0.001 * ops.sum(ops.square(outputs)))
            return outputs

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = Regularized(name="regularized"), layers.Dense(1, name="last")

        def call(self, x):
            outputs = self.last(self.hidden(x))
            self.add_loss(0.01 * ops.sum(ops.square(self.last.kernel)))
            self.add_loss(0.02 * ops.var(outputs))
            return outputs

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(ops.square(y - ops.cast(y_pred, y.dtype))) + 0.7 * sum(self.losses)

    with runner.scope():
        model = Model()
        model.compile(keras.optimizers.SGD(0.05))
    return evaluated(runner, model, numbers(0, ROWS, 4), numbers(1, ROWS, 1))


def one_sided(runner):
    """The first rows add nothing, later ones do. Called twice in a pass."""

    class Hinge(layers.Layer):
        def call(self, x):
            self.add_loss(ops.max(ops.relu(x - 2.0)))
            return x

    with runner.scope():
        inputs, hinge = keras.Input((4,)), Hinge(name="hinge")
        model = keras.Model(inputs, layers.Dense(1)(hinge(layers.Dense(4)(hinge(inputs)))))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x = numbers(0, ROWS, 4)
    return evaluated(runner, model, x * np.linspace(0, 3, ROWS)[:, None], numbers(1, ROWS, 1))


def kept(runner):
    """Layers that assign what they see of the rows to variables, before they use them or after."""

    class Range(layers.Layer):
        """A running maximum, as observers of quantization keep it; in evaluation, too."""

        def build(self, shape):
            self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="largest")

        def call(self, x):
            outputs = x / (1 + self.largest)
            self.largest.assign(ops.maximum(self.largest, ops.ceil(4 * ops.max(ops.abs(x)))))
            return outputs

    class Skips(layers.Layer):
        """Keeps what a call makes in an attribute, and exchanges statistics in the middle of it."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.norms = [layers.BatchNormalization(name=f"norm_{number}") for number in range(2)]

        def build(self, shape):
            for norm in self.norms:
                norm.build(shape)

        def call(self, x, training=False):
            self.parts = []
            for norm in self.norms:
                x = ops.tanh(norm(x, training=training))
                self.parts.append(x)
            return sum(self.parts)

    with runner.scope():
        inputs = keras.Input((6,))
        x = Range(name="range")(layers.Dense(8, "tanh")(inputs))
        x = Skips(name="skips")(x)
        model = keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2)(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return evaluated(runner, model, numbers(0, ROWS, 6), np.arange(ROWS) % 3)


def counted(runner):
    """A model that counts its steps, for a weight of its loss, in `call`."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = layers.Dense(1, name="last")
            self.number = self.add_weight(shape=(), initializer="zeros", trainable=False, name="number")

        def call(self, x, training=False):
            if training:
                self.number.assign_add(1.0)
            outputs = self.last(x)
            self.add_loss(ops.mean(ops.square(outputs)) / (1 + self.number))
            return outputs

    with runner.scope():
        model = Model()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return evaluated(runner, model, numbers(0, ROWS, 4), numbers(1, ROWS, 1))


class Stale(set):
    """Ids of losses that are gone: each loss of the next program has one of them, until this is cleared."""

    def __contains__(self, number):
        return super().__contains__("gone") or super().__contains__(number)


def evaluated(runner, model, x, y=None):
    result = fitted(runner, model, x, y)
    object.__setattr__(model, "_loss_ids", Stale(["gone"]))  # not by Keras, which would copy it
    found = runner.evaluate(model, x, y, batch_size=BATCH, return_dict=True, verbose=0)
    result["evaluated"] = {name: float(value) for name, value in found.items()}
    result["predicted"] = float(np.sum(np.abs(runner.predict(model, x, batch_size=BATCH, verbose=0))))
    return result


if __name__ == "__main__":
    main({case.__name__: case for case in (vae, sums, one_sided, kept, counted)})
