"""Models whose `train_step` means something else on several devices, or that cannot be trained."""

from own_steps_base import ROWS, fitted, in_form_of_backend, minimizing, numbers


def queue(runner):
    """Keeps what it saw in the last step: each device would keep something else."""
    import keras

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


def sum_of_losses(runner):
    """A sum over the samples: the mean of the devices' sums is another number."""
    import keras

    class Sum(minimizing()):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, name="dense")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            loss = self.minimize(
                lambda: keras.ops.sum(keras.ops.square(y - self(x))), self.trainable_weights, self.optimizer
            )
            return {"loss": loss}

    with runner.scope():
        model = in_form_of_backend(Sum)()
        model.compile(keras.optimizers.SGD(0.001))
    return fitted(runner, model, numbers(0, ROWS, 4), numbers(1, ROWS, 3))


def not_built(runner):
    """No `call`, and a part that only a call would build."""
    import keras

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
