"""Trains and evaluates until a fault, which SEED chooses: what happens, where, at which step and on which rank.

python faults.py BACKEND NUM_DEVICES SEED HANG_TIMEOUT
"""

import os
import random
import signal
import sys
import tempfile
import time

import numpy as np

import kerasdp

tempfile.tempdir = None  # where this program runs in a process that had another one
KINDS = ("raise", "sleep", "exit 0", "exit 3", "kill")
# Where, and how often one comes there.
PLACES = {
    "before a step": 16,
    "after a step": 16,
    "in a reading thread": 16,
    "before an epoch": 2,
    "after an epoch": 2,
    "before an evaluation's step": 12,
    "after an evaluation's step": 12,
    "between two calls": 1,
}


def chosen(seed, num_ranks):
    """Kind, place, how often one comes there before, and rank."""
    draw = random.Random(seed)
    kind, place = draw.choice(KINDS), draw.choice(list(PLACES))
    number, rank = draw.randrange(PLACES[place]), draw.randrange(num_ranks)
    return kind, place, number, 0 if place == "in a reading thread" else rank  # which is rank 0's


class Fault:
    """Happens when a rank has come to a place as often as was chosen."""

    def __init__(self, rank, num_ranks):
        self.kind, self.place, self.left, faulty = chosen(int(sys.argv[3]), num_ranks)
        self.is_here = rank == faulty

    def __call__(self, place):
        if place != self.place or not self.is_here:
            return
        self.left -= 1
        if self.left >= 0:
            return
        os.write(1, b"BEGIN %f\n" % time.time())
        if self.kind == "raise":
            raise RuntimeError("the fault")
        if self.kind == "sleep":
            time.sleep(1000)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)
        os._exit(int(self.kind.split()[1]))


def train(runner):
    import keras

    processes = runner.strategy.processes
    fault = Fault(processes.rank, processes.num_processes)
    x, y = np.random.RandomState(0).randn(64, 4).astype("float32"), np.zeros(64, "int32")

    class Batches(keras.utils.PyDataset):
        num_batches = 8

        def __getitem__(self, index):
            fault("in a reading thread")
            return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]

    callback = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_, **__: fault("before a step"),
        on_train_batch_end=lambda *_, **__: fault("after a step"),
        on_epoch_begin=lambda *_, **__: fault("before an epoch"),
        on_epoch_end=lambda *_, **__: fault("after an epoch"),
    )
    of_tests = keras.callbacks.Callback()
    of_tests.on_test_batch_begin = lambda *_, **__: fault("before an evaluation's step")
    of_tests.on_test_batch_end = lambda *_, **__: fault("after an evaluation's step")
    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    runner.fit(
        model, Batches(), epochs=2, verbose=0, validation_data=(x[:16], y[:16]), callbacks=[callback, of_tests],
        validation_batch_size=8,
    )  # fmt: skip
    fault("between two calls")
    runner.evaluate(model, x, y, batch_size=8, callbacks=[of_tests])
    os.write(1, b"ENDS\n")


if __name__ == "__main__":
    backend, count, seed, hang_timeout = sys.argv[1:]
    print("FAULT", *chosen(int(seed), int(count) if backend == "torch" else 1), sep="; ", flush=True)
    kerasdp.launch(
        train, backend=backend, num_devices=int(count), device="cpu", hang_timeout=float(hang_timeout), seed=0
    )
