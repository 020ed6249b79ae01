"""Trains while its framework raises where a step waits for the device or copies behind the program's back.

python gpu_waits.py BACKEND NUM_DEVICES DEVICE MODEL [flags of kerasdp.Config, as JSON]
"""

import functools
import json
import sys
import threading
import time

import numpy as np
from starting import printed

import kerasdp

FIRST, LAST = 10, 30


def train(name, runner):
    """Forty steps, the first of which compile."""
    import keras

    x, y = np.random.RandomState(0).randint(0, 256, (640, 28, 28, 1)).astype("uint8"), np.arange(640) % 10
    with runner.scope():
        model = kerasdp.build_model(name, (28, 28, 1), 10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.03, momentum=0.9), loss, metrics=["accuracy"])
    guard, steps = GUARDS[runner.config.backend], []

    def listen(loss, learning_rate, num_rows):
        steps.append(loss)
        if len(steps) in (FIRST, LAST):
            guard(len(steps) == FIRST)

    class Listener(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            runner.state.add_listener(listen)

    history = runner.fit(model, x, y, batch_size=16, epochs=1, callbacks=[Listener()])
    return {"steps": len(steps), "loss": history.history["loss"][0]}


def wait_elsewhere(stream):
    """Waits for a stream, which the thread that copies batches may, and the one that trains may not."""
    assert threading.current_thread() is not threading.main_thread()
    while not stream.query():
        time.sleep(0.0001)


def guard_torch(is_on):
    """Raises where the host waits for the GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.Stream.synchronize = wait_elsewhere  # the mode is that of all threads
        torch.cuda.set_sync_debug_mode("error" if is_on else "default")


def guard_jax(is_on):
    """Raises where an array comes from or goes to the host that nobody put there."""
    import jax

    jax.config.update("jax_transfer_guard", "disallow" if is_on else "allow")


def guard_tensorflow(is_on):
    """Nothing more: operations without a GPU kernel are refused from the start."""


GUARDS = {"torch": guard_torch, "jax": guard_jax, "tensorflow": guard_tensorflow}

if __name__ == "__main__":
    if sys.argv[1] == "tensorflow":
        import tensorflow as tf

        tf.config.set_soft_device_placement(False)
    settings = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    printed(functools.partial(train, sys.argv[4]), *sys.argv[1:3], device=sys.argv[3], log_every=1000, **settings)
