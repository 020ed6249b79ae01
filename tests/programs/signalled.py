"""Trains a small model until a signal comes, as a script of somebody's own or as a recipe.

python signalled.py script BACKEND NUM_DEVICES WORKDIR or: python signalled.py recipe FLAGS...

It prints READY after the second step. A script with WORKDIR "-" has none. In the environment: SLOW, that step takes
longer than anyone will wait; RESUME, the script resumes; LAST_STEP, where it ends by itself.
"""

import os
import sys
import time

import numpy as np
from absl import app

import kerasdp

way, *given = sys.argv[1:]
IS_SLOW, LAST = "SLOW" in os.environ, int(os.environ.get("LAST_STEP", "0"))


def train(runner):
    import keras

    class Tell(keras.callbacks.Callback):
        num_steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.num_steps += 1
            if self.num_steps == 2:
                print("READY", flush=True)
                if IS_SLOW:
                    time.sleep(100)
            time.sleep(0.01)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(8, 3))
    model.fit(x, x[:, :1], batch_size=4, epochs=LAST // 2 or 100_000, verbose=0, callbacks=[Tell()])


if __name__ == "__main__":
    if way == "script":
        backend, count, workdir = given[:3]
        choices = {} if workdir == "-" else {"workdir": workdir, "resume": "RESUME" in os.environ}
        if backend == "torch":  # a run that is so long would be compiled, for as long as all else here takes
            choices["compile"] = "off"
        kerasdp.launch(train, backend=backend, num_devices=int(count), device="cpu", verbose=0, **choices)
    else:
        sys.argv[1:] = given
        kerasdp.flags.define()
        app.run(lambda argv: kerasdp.launch(train, **kerasdp.flags.values(argv)))
