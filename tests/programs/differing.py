"""Trains on several hosts, of which host 1 does one thing otherwise.

python differing.py CASE FIELDS: of `CASES`, and fields of kerasdp.Config as JSON. It prints `TRAINS` when it begins.
"""

import json
import sys
import time

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

    def model(self, units=8):
        import keras

        with self.runner.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "relu"), keras.layers.Dense(2)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
        return model

    def fit(self, model=None, **changes):
        arguments = {"x": self.x, "y": self.y, "batch_size": BATCH, "epochs": 2, "verbose": 0} | changes
        return self.runner.fit(model or self.model(), **arguments)

    def nothing(self):
        self.fit()

    def other_rows(self):
        self.fit(x=self.x[::-1].copy() if self.is_other else self.x)

    def other_targets(self):
        self.fit(y=1 - self.y if self.is_other else self.y)

    def fewer_rows(self):
        count = ROWS - 8 if self.is_other else ROWS
        self.fit(x=self.x[:count], y=self.y[:count])

    def other_weights(self):
        model = self.model()
        if self.is_other:
            draw = np.random.RandomState(1)
            model.set_weights([draw.randn(*weight.shape) for weight in model.get_weights()])
        self.fit(model)

    def other_layers(self):
        self.fit(self.model(units=16 if self.is_other else 8))

    def evaluates(self):
        if self.is_other:
            self.runner.evaluate(self.model(), self.x, self.y, batch_size=BATCH, verbose=0)
        else:
            self.fit()

    def returns_before(self):
        model = self.model()
        if not self.is_other:
            self.fit(model)

    def raises_before(self):
        model = self.model()
        if self.is_other:
            raise RuntimeError("the second host gives up")
        self.fit(model)

    def fewer_epochs(self):
        self.fit(epochs=1 if self.is_other else 2)

    def one_more_fit(self):
        model = self.model()
        self.fit(model)
        if not self.is_other:
            self.fit(model)

    def stops_within(self):
        """By a callback of its own, in the middle of an epoch."""
        self.fit(callbacks=self.stopper("on_train_batch_end", 3))

    def stops_early(self):
        self.fit(epochs=4, callbacks=self.stopper("on_epoch_end", 1))

    def stopper(self, when, place):
        import keras

        callback = keras.callbacks.Callback()

        def stop(number, logs=None):
            if self.is_other and number == place:
                callback.model.stop_training = True

        setattr(callback, when, stop)
        return [callback]

    def validates(self):
        data = {"validation_data": (self.x, self.y)} if self.is_other else {}
        self.fit(**data)


CASES = [name for name in vars(Host) if not name.startswith("_") and name not in ("model", "fit", "stopper")]


def train(runner, case):
    host = Host(runner)
    print(f"TRAINS {time.time()}", flush=True)
    getattr(host, case)()
    print("ENDS", flush=True)


if __name__ == "__main__":
    case, fields = sys.argv[1], json.loads(sys.argv[2])
    try:
        kerasdp.launch(lambda runner: train(runner, case), device="cpu", verbose=0, **fields)
    except kerasdp.RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
