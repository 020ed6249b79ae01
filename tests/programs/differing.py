"""Trains on several hosts, of which host 1 does one thing otherwise.

python differing.py CASE FIELDS: a method of `Host`, and fields of kerasdp.Config as JSON.
"""

import json
import sys

import numpy as np

import kerasdp

ROWS, BATCH = 64, 8


class Host:
    """What a script does, on host 1 otherwise than on host 0."""

    def __init__(self, runner):
        self.runner, self.rank = runner, runner.strategy.processes.rank
        draw = np.random.RandomState(0)
        self.x, self.y = draw.randn(ROWS, 4).astype("float32"), draw.randint(0, 2, ROWS).astype("int32")
        self.is_other = self.rank == 1

    def model(self):
        import keras

        with self.runner.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        return model

    def fit(self, model=None, **changes):
        arguments = {"x": self.x, "y": self.y, "batch_size": BATCH, "epochs": 2, "verbose": 0} | changes
        return self.runner.fit(model or self.model(), **arguments)

    def nothing(self):
        self.fit()

    def fewer_rows(self):
        count = ROWS - 8 if self.is_other else ROWS
        self.fit(x=self.x[:count], y=self.y[:count])

    def other_weights(self):
        model = self.model()
        if self.is_other:
            draw = np.random.RandomState(1)
            model.set_weights([draw.randn(*weight.shape) for weight in model.get_weights()])
        self.fit(model)

    def evaluates(self):
        if self.is_other:
            self.runner.evaluate(self.model(), self.x, self.y, batch_size=BATCH, verbose=0)
        else:
            self.fit()

    def raises_before(self):
        model = self.model()
        if self.is_other:
            raise RuntimeError("the second host gives up")
        self.fit(model)

    def stops_within(self):
        """By a callback of its own, in the middle of an epoch."""
        import keras

        def stop(number, logs=None):
            if self.is_other and number == 3:
                callback.model.stop_training = True

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        self.fit(callbacks=[callback])


def train(runner, case):
    host = Host(runner)
    getattr(host, case)()
    print("ENDS", flush=True)


if __name__ == "__main__":
    case, fields = sys.argv[1], json.loads(sys.argv[2])
    kerasdp.launch(lambda runner: train(runner, case), device="cpu", verbose=0, **fields)
