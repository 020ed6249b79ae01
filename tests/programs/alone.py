"""Lets one rank do something alone, in the way that MODE says, and tells when.

python alone.py MODE FIELDS: a method of `Ranks`, and fields of kerasdp.Config in JSON
"""

import contextlib
import json
import os
import signal
import sys
import time

import numpy as np

import kerasdp

X, Y = np.random.RandomState(0).randn(64, 4).astype("float32"), np.zeros(64, "int32")


class Ranks:
    """What a script does, on rank 1 otherwise than on rank 0."""

    def __init__(self, runner):
        import keras

        self.runner, self.rank = runner, runner.strategy.processes.rank
        self.last = runner.strategy.processes.num_processes - 1
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        with runner.scope():
            self.model = self.new_model(3)

    def new_model(self, units):
        import keras

        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, name="dense")])
        model.compile("sgd", self.loss)
        return model

    def fit(self, x=X, y=Y, epochs=2, **arguments):
        return self.runner.fit(self.model, x, y, batch_size=8, epochs=epochs, verbose=0, **arguments)

    def trouble(self, what, ranks=()):
        """A callback that does something on some ranks alone, or on the last one."""
        import keras

        def on_train_batch_end(number, logs=None):
            if number == 3 and self.rank in (ranks or (self.last,)):
                self.begin()
                what()

        return [keras.callbacks.LambdaCallback(on_train_batch_end=on_train_batch_end)]

    def begin(self):
        os.write(1, b"BEGIN %f\n" % time.time())  # whole lines, of two processes

    def nothing(self):
        self.fit()

    def evaluates_before_fit(self):
        self.fit()
        self.begin()
        if self.runner.is_chief:
            self.runner.evaluate(self.model, X, Y)
        self.fit()

    def evaluates_in_callback(self):
        self.fit(callbacks=self.trouble(lambda: self.runner.evaluate(self.model, X, Y)))

    def returns_early(self):
        self.fit()
        self.begin()
        if self.rank == 1:
            return
        self.fit()

    def swallows(self):
        with contextlib.suppress(ValueError):
            self.fit(callbacks=self.trouble(self.raise_))

    def swallows_and_sleeps(self):
        self.swallows()
        time.sleep(1000)

    def all_swallow_and_fit(self):
        with contextlib.suppress(ValueError):
            self.fit(callbacks=self.trouble(self.raise_, ranks=(0, 1)))
        self.fit()

    def raise_(self):
        raise ValueError("bad luck")

    def builds_another_model(self):
        self.begin()
        if self.rank == 1:
            self.model = self.new_model(5)
        self.fit()

    def has_less_data(self):
        count = 64 - 8 * self.rank
        self.begin()
        self.fit(X[:count], Y[:count])

    def has_other_values(self):
        self.begin()
        self.fit(np.random.default_rng(self.rank).random(X.shape))

    def has_other_weights(self):
        self.begin()
        self.model.get_layer("dense").bias.assign_add(np.full(3, self.rank))
        self.fit()

    def raises_before(self):
        if self.rank == 1:
            raise RuntimeError("the second host gives up")
        self.fit()

    def stops_within(self):
        self.fit(callbacks=self.trouble(lambda: setattr(self.model, "stop_training", True)))

    def fills_the_memory(self):
        import keras

        self.fit(callbacks=self.trouble(lambda: keras.ops.zeros((10**7, 10**8))))

    def drifts(self):
        self.fit(callbacks=self.trouble(lambda: drift(self.runner, self.model)))

    def validates(self):
        self.begin()
        self.fit(validation_data=(X, Y) if self.rank == 1 else None)

    def exits(self):
        self.fit(callbacks=self.trouble(lambda: os._exit(0)))

    def calls_sys_exit(self):
        self.fit(callbacks=self.trouble(sys.exit))

    def calls_sys_exit_with_3(self):
        self.fit(callbacks=self.trouble(lambda: sys.exit(3)))

    def all_call_sys_exit(self):
        self.fit(callbacks=self.trouble(sys.exit, ranks=(0, 1)))

    def sleeps(self):
        self.fit(callbacks=self.trouble(lambda: time.sleep(1000)))

    def launches(self):
        self.begin()
        kerasdp.launch(train, backend=self.runner.config.backend, num_devices=1, device="cpu")

    def ignores_signals(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.fit(callbacks=self.trouble(lambda: time.sleep(1000), ranks=(0, 1)))

    def has_a_callback(self):
        self.begin()
        self.fit(callbacks=self.trouble(print) if self.runner.is_chief else None)

    def works_after_fit(self):
        self.fit()
        if self.runner.is_chief:
            time.sleep(self.runner.config.hang_timeout + 2)


def drift(runner, model):
    """Changes a weight on one replica alone."""
    weight = model.trainable_variables[0]
    if runner.config.backend == "torch":
        weight.assign(weight.value * 1.001)
    elif runner.config.backend == "tensorflow":
        copies = runner.strategy.mirrored.experimental_local_results(weight.value)
        copies[-1].assign(copies[-1] * 1.001)
    else:
        import jax

        model.jax_state_sync()
        shards = [shard.data for shard in weight.value.addressable_shards]
        shards[-1] = shards[-1] * 1.001
        weight._value = jax.make_array_from_single_device_arrays(weight.shape, weight.value.sharding, shards)


def train(runner):
    ranks = Ranks(runner)
    getattr(ranks, sys.argv[1])()
    os.write(1, b"ENDS\n")


if __name__ == "__main__":
    kerasdp.launch(train, **{"device": "cpu", "verbose": 0} | json.loads(sys.argv[2]))
