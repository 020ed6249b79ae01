"""Trains a small model on a machine on which something goes wrong; tells where each rank is by files.

python rough.py FOLDER MIB FLAGS...: the flags of recipes/train.py. In FOLDER, `rank-N` has a rank's process id, and
`step-N` says that rank 0 is after that step. MIB: what the last rank takes of memory after step 8, if it is not 0.
"""

import functools
import os
import pathlib
import sys
import time

import numpy as np

import kerasdp


def train(folder, mib, runner):
    import keras

    processes = runner.strategy.processes
    (pathlib.Path(folder) / f"rank-{processes.rank}").write_text(str(os.getpid()))
    random = np.random.RandomState(0)
    x, y = random.randn(128, 8).astype("float32"), random.randint(0, 3, 128)
    taken = []

    class Steps(keras.callbacks.Callback):
        number = 0

        def on_train_batch_end(self, batch, logs=None):
            self.number += 1
            if processes.rank == 0:
                (pathlib.Path(folder) / f"step-{self.number}").touch()
            # So that something can go wrong in the middle.
            time.sleep(float(os.environ.get("KERASDP_TEST_PAUSE", "0")))
            if mib and self.number == 8 and processes.rank == processes.num_processes - 1:
                taken.extend(np.ones((2**17,)) for _ in range(mib))

    with runner.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])
        model.compile(
            kerasdp.make_optimizer(runner.config), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    runner.fit(model, x, y, epochs=runner.config.epochs, callbacks=[Steps()])


if __name__ == "__main__":
    _, place, amount, *flags = sys.argv
    sys.argv[1:] = flags
    kerasdp.main(functools.partial(train, place, int(amount)))
