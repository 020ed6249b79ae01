"""A model that clips its gradients in the step, by the framework's own functions."""

import keras
from own_steps_base import ROWS, fitted, numbers


def clipped(runner):
    """Their norm, which some steps exceed; with torch single numbers after that."""

    class Clipped(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = keras.layers.Dense(6, "relu"), keras.layers.Dense(1)

        def call(self, x):
            return self.last(self.hidden(x))

        def train_step(self, data):
            return {"loss": (self.step_of_torch if keras.backend.backend() == "torch" else self.step)(*data)}

        def step_of_torch(self, x, y):
            import torch

            values = [weight.value for weight in self.trainable_weights]
            for value in values:
                value.grad = None
            loss = keras.ops.mean(keras.ops.square(y - self(x)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(iter(values), 1.5)
            torch.nn.utils.clip_grad_value_(values[0], 0.3)
            with torch.no_grad():
                self.optimizer.apply([value.grad for value in values], self.trainable_weights)
            return loss.detach()

        def step(self, x, y):
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(y - self(x)))
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_weights), 1.5)
            self.optimizer.apply(gradients, self.trainable_weights)
            return loss

    with runner.scope():
        model = Clipped()
        model.compile(keras.optimizers.SGD(0.1))
    return fitted(runner, model, numbers(0, ROWS, 4), numbers(1, ROWS, 1))
