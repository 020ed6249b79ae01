"""A model whose loss compares the samples of the global batch: with `kerasdp.all_rows` it trains on several devices."""

import keras
import numpy as np
from keras import layers, ops
from own_steps_base import ROWS, fitted, in_form_of_backend, minimizing, numbers

import kerasdp


def neighbours(runner):
    """Contrastive, with neighbours from a queue of what was seen, and an optimizer that Keras' `compile` does not know.

    One loss is taken of all rows on each device, one of its own rows compared with all.
    """

    class Neighbours(minimizing()):
        def __init__(self):
            super().__init__()
            self.coder = keras.Sequential(
                [keras.Input((6,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dense(4)]
            )
            self.seeds = keras.random.SeedGenerator(5)
            queue = keras.initializers.Constant(numbers(7, 20, 4) / 2)
            self.queue = self.add_weight(shape=(20, 4), initializer=queue, trainable=False, name="queue")
            self.of_contrast = keras.metrics.Mean(name="c_loss")

        def compile(self, contrastive_optimizer):
            super().compile()
            self.contrastive_optimizer = contrastive_optimizer

        @property
        def metrics(self):
            return [self.of_contrast]

        def view(self, x):
            return x + 0.3 * keras.random.normal(ops.shape(x), seed=self.seeds)

        def neighbour(self, features):
            alike = ops.matmul(features, ops.transpose(self.queue))
            nearest = ops.take(ops.convert_to_tensor(self.queue), ops.argmax(alike, axis=1), axis=0)
            return features + ops.stop_gradient(nearest - features)

        def contrast(self, one, other):
            """Returns the loss of all rows, and the features for the queue."""
            own = [ops.normalize(self.coder(view, training=True), axis=1) for view in (one, other)]
            first, second = (kerasdp.all_rows(features) for features in own)
            labels = ops.arange(first.shape[0])
            alike = [
                ops.matmul(self.neighbour(first), ops.transpose(second)) / 0.1,
                ops.matmul(self.neighbour(second), ops.transpose(first)) / 0.1,
            ]
            losses = [ops.mean(ops.sparse_categorical_crossentropy(labels, each, from_logits=True)) for each in alike]
            among_all = ops.logsumexp(ops.matmul(own[0], ops.transpose(second)), axis=1)
            own_loss = ops.mean(among_all - ops.sum(own[0] * own[1], axis=1))
            return sum(losses) + 0.5 * own_loss, ops.stop_gradient(first)

        def train_step(self, data):
            x, _ = data
            one, other = self.view(x), self.view(x)
            loss, seen = self.minimize(
                lambda: self.contrast(one, other),
                self.coder.trainable_weights,
                self.contrastive_optimizer,
                has_aux=True,
            )
            self.of_contrast.update_state(loss)
            self.queue.assign(ops.concatenate([seen, self.queue[: -seen.shape[0]]]))
            return {"c_loss": self.of_contrast.result()}

    with runner.scope():
        model = in_form_of_backend(Neighbours)()
        model.compile(keras.optimizers.Adam(0.01))
    result = fitted(runner, model, numbers(0, ROWS, 6), np.arange(ROWS) % 3)
    if keras.backend.backend() == "jax":  # where the model holds the optimizers' variables, too
        result["weights"] = []
    return result | {"queue": np.asarray(keras.ops.convert_to_numpy(model.queue)).tolist()}
