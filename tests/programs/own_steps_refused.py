"""Models whose `train_step` means something else on several devices, or that cannot be trained."""

import keras
from keras import ops
from own_steps_base import ROWS, fitted, in_form_of_backend, minimizing, numbers


def queue(runner):
    """Keeps what it saw in the last step: each device would keep something else."""

    class Queue(minimizing()):
        def __init__(self):
            super().__init__(name="queue")
            self.dense = keras.layers.Dense(3)
            self.seen = self.add_weight(shape=(3,), trainable=False, name="seen", initializer="zeros")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data

            def loss_of():
                return keras.ops.mean(keras.ops.square(y - self(x) - self.seen))

            loss = self.minimize(loss_of, self.trainable_weights, self.optimizer)
            self.seen.assign(keras.ops.stop_gradient(self(x))[0])
            return {"loss": loss}

    with runner.scope():
        model = in_form_of_backend(Queue)()
        model.compile("sgd")
    return fitted(runner, model, numbers(0, ROWS, 4), numbers(1, ROWS, 3))


def one_layer(runner, loss_of, change=lambda x: x, metric=None, spare=None):
    """Trains a dense layer by a loss of targets and outputs, with plain SGD; `spare`: an attribute of the model."""

    class Sum(minimizing()):
        def __init__(self):
            super().__init__()
            self.dense, self.metric, self.spare = keras.layers.Dense(3, name="dense"), metric, spare

        @property
        def metrics(self):
            return [] if self.metric is None else [self.metric]

        def call(self, x):
            return self.dense(x)

        def loss_of(self, y, outputs):
            return loss_of(y, outputs)

        def train_step(self, data):
            x, y = change(data[0]), data[1]
            loss = self.minimize(lambda: loss_of(y, self(x)), self.trainable_weights, self.optimizer)
            if metric is not None:
                metric.update_state(data[1], keras.ops.stop_gradient(self(x)))
            return {"loss": loss} | {metric.name: metric.result() for metric in self.metrics}

    with runner.scope():
        model = in_form_of_backend(Sum)()
        model.compile(keras.optimizers.SGD(0.001))
    return fitted(runner, model, numbers(0, ROWS, 4), numbers(1, ROWS, 3))


def foreign_numbers(runner):
    """Noise from the backend's own generator, which gives the same on each device."""

    def noisy(x):
        if keras.backend.backend() == "torch":
            import torch

            return x + torch.randn(x.shape, dtype=x.dtype)
        import tensorflow as tf

        return x + tf.random.normal(x.shape, dtype=x.dtype)

    return one_layer(runner, lambda y, outputs: keras.ops.mean(keras.ops.square(y - outputs)), noisy)


def largest_output(runner):
    """A metric that does not add up."""
    from learn_classes import MaximumLogit

    with runner.scope():
        metric = MaximumLogit()
    return one_layer(runner, lambda y, outputs: ops.mean(ops.square(y - outputs)), metric=metric)


def float8(runner):
    """Gradients that are next values, found in the rows of one device; too large there, since its loss is a mean."""

    def loss_of(y, outputs):
        return keras.ops.mean(keras.ops.square(y - last(outputs, training=True)))

    with runner.scope():
        last = keras.layers.Dense(3)
        last.build((None, 3))
        last.quantize("float8")
    return one_layer(runner, loss_of, spare=last)


def spare_optimizer(runner):
    """An optimizer that the first step does not use, of which it is not known what a checkpoint must hold."""
    with runner.scope():
        spare = [keras.optimizers.Adam()]
    return one_layer(runner, lambda y, outputs: keras.ops.mean(keras.ops.square(y - outputs)), spare=spare)


def not_built(runner):
    """No `call`, and a part that only a call would build."""

    class NotBuilt(keras.Model):
        def __init__(self):
            super().__init__(name="not_built")
            self.part = keras.Sequential([keras.layers.Dense(3)])

        def train_step(self, *args):
            raise NotImplementedError

    with runner.scope():
        model = NotBuilt()
        model.compile("sgd")
    return fitted(runner, model, numbers(0, ROWS, 4))
