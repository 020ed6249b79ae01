"""A script without `if __name__ == "__main__":`, whose `train` is an inner function that uses what is around it.

python callers.py BACKEND NUM_DEVICES FOLDER [MAX_RESTARTS]
"""

import dataclasses
import enum
import inspect
import json
import pickle
import sys
import time

import keras
import numpy as np

import kerasdp

print("the top of the script")
backend, num_devices, folder, *more = sys.argv[1:]
X = np.random.RandomState(0).randn(2000, 8).astype("float32")
Y = np.arange(2000) % 3
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
half = keras.layers.Rescaling(0.5)  # it has no weights
keras.config.set_epsilon(1e-6)


class Kind(enum.Enum):
    GOOD = 1


@dataclasses.dataclass
class Result:
    losses: list[float]
    kind: Kind

    def __getstate__(self):  # so slowly that the other ranks' nothing has come by then
        time.sleep(1)
        return vars(self)


@keras.saving.register_keras_serializable("callers")
class Twice(keras.layers.Layer):
    def call(self, x):
        return twice(x)


def twice(x):
    return 2 * x


def train_of(epochs):
    def train(runner):
        model = keras.Sequential([keras.Input((8,)), half, Twice(), keras.layers.Dense(3)])
        model.compile("sgd", loss)
        history = runner.fit(model, X, Y, batch_size=500, epochs=epochs, verbose=0).history
        assert X.flags.writeable and X.flags.aligned
        # Both look for the class by its name.
        if Result.__module__ in sys.modules:
            assert type(pickle.loads(pickle.dumps(Result([], Kind.GOOD)))) is Result
        copy = keras.Sequential.from_config(model.get_config())
        assert type(copy.layers[1]) is Twice
        assert "return 2 * x" in inspect.getsource(twice)
        assert keras.config.epsilon() == 1e-6
        print("trained by", "the chief" if runner.is_chief else "another")
        return Result(history["loss"], Kind.GOOD)

    return train


settings = kerasdp.Config(backend=backend, num_devices=int(num_devices), device="cpu", verbose=0)
if more:
    settings = dataclasses.replace(settings, max_restarts=int(more[0]), workdir=folder)
result = kerasdp.launch(train_of(epochs=2), settings)
assert isinstance(result, Result) and result.kind is Kind.GOOD
print("RESULT " + json.dumps(result.losses))
