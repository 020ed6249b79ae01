"""Launches runs, or calls `fit`, again and again in one process; prints what the process holds as it goes.

python repeated.py BACKEND NUM_DEVICES WHAT COUNT: WHAT is launches, fits, or "fits of new models"; or what happens
within one call of `fit` or `predict`, where each rank says what it holds: steps, epochs, or predictions
"""

import gc
import itertools
import json
import os
import sys
import threading
import time

import numpy as np

import kerasdp

MARKS = (1, 5, 10, 20, 50, 100, 200, 500, 1000)
ROWS = 16  # of a batch


def held(number, begin):
    """Memory in MiB, open files and threads."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {
        "number": number,
        "mib": round(resident, 1),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "seconds": round(time.monotonic() - begin, 1),
    }


def make_model(runner):
    import keras

    with runner.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def data(num_rows=64):
    random = np.random.RandomState(0)
    return random.randn(num_rows, 8).astype("float32"), random.randint(0, 3, num_rows)


def train_once(runner, model=None):
    x, y = data()
    return runner.fit(model or make_model(runner), x, y, batch_size=ROWS, epochs=1, verbose=0).history["loss"][0]


def often(once):
    """The losses of many, and what is held after some."""
    losses, found, begin = [], [], time.monotonic()
    for number in range(1, COUNT + 1):
        losses.append(once())
        gc.collect()  # what waits for it is not held, and leaves gaps
        if number in MARKS or number == COUNT:
            found.append(held(number, begin))
    return {"losses": losses, "held": found}


def train_often(runner):
    model = make_model(runner) if WHAT == "fits" else None
    return often(lambda: train_once(runner, model))


def within(runner):
    """What each rank holds after some steps or epochs of one `fit`, or after some batches of one `predict`."""
    import keras

    found, begin, num_done = [], time.monotonic(), itertools.count(1)

    def note(number_in_fit, logs=None):
        number = next(num_done)
        if number in MARKS or number == COUNT:
            found.append(held(number, begin))

    event = {"steps": "on_train_batch_end", "epochs": "on_epoch_end", "predictions": "on_predict_batch_end"}[WHAT]
    choices = {"batch_size": ROWS, "callbacks": [keras.callbacks.LambdaCallback(**{event: note})], "verbose": 0}
    model, (x, y) = make_model(runner), data() if WHAT == "epochs" else data(COUNT * ROWS)
    if WHAT == "predictions":
        runner.predict(model, x, **choices)
    else:
        more = {"epochs": COUNT, "validation_data": data()} if WHAT == "epochs" else {}
        runner.fit(model, x, y, **more, **choices)
    return {"ranks": runner.strategy.processes.all_gather_object(found)}


if __name__ == "__main__":
    backend, num_devices, WHAT, count = sys.argv[1:]
    COUNT, choices = int(count), {"backend": backend, "num_devices": int(num_devices), "device": "cpu", "verbose": 0}
    result = (
        often(lambda: kerasdp.launch(train_once, **choices))
        if WHAT == "launches"
        else kerasdp.launch(within if WHAT in ("steps", "epochs", "predictions") else train_often, **choices)
    )
    print("RESULT " + json.dumps(result))
