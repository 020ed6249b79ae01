"""Trains a small model on a machine on which something goes wrong; tells where it is by files.

python rough.py FOLDER FLAGS... In FOLDER, `step-N` says that rank 0 is after that step.
"""

import functools
import os
import pathlib
import sys
import time

import numpy as np
from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 20, "Passes over the data.")
flags.DEFINE_string("optimizer", "sgd(learning_rate=0.03, momentum=0.9)", "Optimizer of Keras.")
flags.DEFINE_float("learning_rate", None, "Learning rate.")
kerasdp.flags.define()


def train(folder, runner):
    import keras

    random = np.random.RandomState(0)
    x, y = random.randn(128, 8).astype("float32"), random.randint(0, 3, 128)

    class Steps(keras.callbacks.Callback):
        number = 0

        def on_train_batch_end(self, batch, logs=None):
            self.number += 1
            if runner.is_chief:
                (pathlib.Path(folder) / f"step-{self.number}").touch()
            # So that something can go wrong in the middle.
            time.sleep(float(os.environ.get("KERASDP_TEST_PAUSE", "0")))

    with runner.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])
        model.compile(
            kerasdp.make_optimizer(FLAGS.optimizer, FLAGS.learning_rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    runner.fit(model, x, y, epochs=FLAGS.epochs, callbacks=[Steps()])


if __name__ == "__main__":
    _, place, *sys.argv[1:] = sys.argv
    app.run(lambda argv: kerasdp.launch(functools.partial(train, place), **kerasdp.flags.values(argv)))
