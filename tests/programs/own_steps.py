"""Trains models that have a `train_step` of their own on several devices: one for all backends, or (OWN_STEPS=native)
in the form of each backend's guide.
"""

import chosen_backend  # noqa: F401
import keras
import numpy as np
from keras import layers, ops
from own_steps_base import BATCH, ROWS, fitted, in_form_of_backend, main, minimizing, numbers
from own_steps_clipped import clipped
from own_steps_contrastive import neighbours
from own_steps_refused import float8, foreign_numbers, largest_output, not_built, queue, spare_optimizer


def gan(runner):
    """No `call`, a `compile` of its own, two optimizers that nobody has built; `x` comes alone."""

    class Gan(minimizing()):
        def __init__(self):
            super().__init__()
            self.judge = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(1)])
            self.maker = keras.Sequential([keras.Input((3,)), layers.Dense(8), layers.BatchNormalization(),
                                           layers.LeakyReLU(0.2), layers.Dense(4)])  # fmt: skip
            self.seeds = keras.random.SeedGenerator(7)
            self.of_judge, self.of_maker = keras.metrics.Mean(name="judge"), keras.metrics.Mean(name="maker")

        def compile(self, for_judge, for_maker, loss):
            super().compile()
            self.for_judge, self.for_maker, self.loss_function = for_judge, for_maker, loss

        @property
        def metrics(self):
            return [self.of_judge, self.of_maker]

        def train_step(self, real):
            if isinstance(real, tuple):
                real = real[0]
            rows = ops.shape(real)[0]
            made = ops.stop_gradient(self.maker(self.noise(rows), training=True))
            labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))])
            labels = labels + 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seeds)
            both = ops.concatenate([made, ops.cast(real, made.dtype)])
            judge = self.minimize(
                lambda: self.loss_function(labels, self.judge(both)), self.judge.trainable_weights, self.for_judge
            )
            noise = self.noise(rows)
            maker = self.minimize(
                lambda: self.loss_function(ops.zeros((rows, 1)), self.judge(self.maker(noise, training=True))),
                self.maker.trainable_weights,
                self.for_maker,
            )
            self.of_judge.update_state(judge)
            self.of_maker.update_state(maker)
            return {"judge": self.of_judge.result(), "maker": self.of_maker.result()}

        def noise(self, rows):
            return keras.random.normal((rows, 3), seed=self.seeds)

    with runner.scope():
        model = in_form_of_backend(Gan)()
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.003, clipnorm=1.0), loss)
    return fitted(runner, model, numbers(0, ROWS, 4))


def vae(runner):
    """Samples drawn in the step, a `test_step`, a `predict_step`, and a regularized layer."""

    class Vae(minimizing()):
        def __init__(self):
            super().__init__()
            self.coder = keras.Sequential(
                [keras.Input((4,)), layers.Dense(8, "relu", kernel_regularizer="l2"), layers.Dense(4)]
            )
            self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(4)])
            self.seeds = keras.random.SeedGenerator(5)
            self.total, self.apart = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="apart")

        @property
        def metrics(self):
            return [self.total, self.apart]

        def losses_of(self, x):
            mean, spread = ops.split(self.coder(x), 2, axis=1)
            z = mean + ops.exp(0.5 * spread) * keras.random.normal(ops.shape(mean), seed=self.seeds)
            error = ops.mean(ops.sum(ops.square(x - self.decoder(z)), axis=1))
            apart = ops.mean(ops.sum(-0.5 * (1 + spread - ops.square(mean) - ops.exp(spread)), axis=1))
            return error + apart + sum(self.losses), apart

        def train_step(self, data):
            x = data[0] if isinstance(data, tuple) else data
            found = self.minimize(lambda: self.losses_of(x), self.trainable_weights, self.optimizer, has_aux=True)
            self.total.update_state(found[0])
            self.apart.update_state(found[1])
            return {metric.name: metric.result() for metric in self.metrics}

        def test_step(self, data):
            total, apart = self.losses_of(data)
            self.total.update_state(total)
            self.apart.update_state(apart)
            return {metric.name: metric.result() for metric in self.metrics}

        def predict_step(self, data):
            return self.decoder(ops.split(self.coder(data), 2, axis=1)[0])

    with runner.scope():
        model = in_form_of_backend(Vae)()
        model.compile(keras.optimizers.Adam(0.01))
    result = fitted(runner, model, numbers(0, ROWS, 4), validation_data=(numbers(2, 13, 4),))
    result["evaluated"] = runner.evaluate(model, numbers(2, 13, 4), batch_size=BATCH, return_dict=True)
    result["evaluated"] = {name: float(value) for name, value in result["evaluated"].items()}
    result["predicted"] = np.asarray(runner.predict(model, numbers(2, 13, 4), batch_size=BATCH)).tolist()
    return result


def steps_of_keras(runner):
    """Steps that only add to Keras' own, with losses, metrics, sample weights and a penalty."""

    class Counting(keras.Model):
        num_steps = 0

        def train_step(self, *args):
            self.num_steps += 1
            return super().train_step(*args)

        def test_step(self, *args):
            return super().test_step(*args)

    with runner.scope():
        inputs = keras.Input((4,))
        x = layers.BatchNormalization()(layers.Dense(8, "relu", activity_regularizer="l2")(inputs))
        model = Counting(inputs, layers.Dense(3)(layers.Dropout(0.4)(x)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.Adam(0.01, clipnorm=0.5), loss, metrics=["accuracy"], weighted_metrics=["accuracy"]
        )
    y, weights = np.arange(ROWS) % 3, np.linspace(0.5, 2, ROWS)
    result = fitted(runner, model, numbers(0, ROWS, 4), y, sample_weight=weights)
    is_eager = keras.backend.backend() == "torch"  # elsewhere it counts how often the step is traced
    assert not is_eager or model.num_steps == 12, model.num_steps
    result["evaluated"] = [float(value) for value in runner.evaluate(model, numbers(2, 13, 4), np.arange(13) % 3)]
    return result


def as_in_the_guide(runner):
    """A loop over all metrics, among them a dictionary of `compile`'s; an embedding, whose gradient may be sparse."""

    class Custom(minimizing()):
        def train_step(self, data):
            x, y, sample_weight = data

            def loss_of():
                outputs = self(x, training=True)
                return self.compute_loss(y=y, y_pred=outputs, sample_weight=sample_weight), outputs

            loss, outputs = self.minimize(loss_of, self.trainable_weights, self.optimizer, has_aux=True)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, outputs, sample_weight=sample_weight)
            return {metric.name: metric.result() for metric in self.metrics}

    with runner.scope():
        inputs = keras.Input((4,))
        x = layers.Flatten()(layers.Embedding(9, 3)(inputs))
        model = Custom(inputs, layers.Dense(3)(layers.Dropout(0.2)(layers.Dense(8, "relu")(x))))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.RMSprop(0.01), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    tokens = np.random.RandomState(0).randint(0, 9, (ROWS, 4))
    return fitted(runner, model, tokens, np.arange(ROWS) % 3, sample_weight=np.linspace(0.5, 2, ROWS))


if __name__ == "__main__":
    cases = (
        steps_of_keras, as_in_the_guide, gan, vae, neighbours, clipped, queue, float8,
        foreign_numbers, largest_output, not_built, spare_optimizer,
    )  # fmt: skip
    main({case.__name__: case for case in cases})
