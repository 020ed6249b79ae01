"""Launches runs, or calls `fit`, again and again in one process; prints what the process holds as it goes.

python repeated.py BACKEND NUM_DEVICES WHAT COUNT: WHAT is launches, or fits
"""

import gc
import json
import os
import sys
import threading
import time

import numpy as np

import kerasdp

MARKS = (1, 5, 10, 20, 50, 100, 200, 500, 1000)


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


def data():
    random = np.random.RandomState(0)
    return random.randn(64, 8).astype("float32"), random.randint(0, 3, 64)


def train_once(runner):
    x, y = data()
    return runner.fit(make_model(runner), x, y, batch_size=16, epochs=1, verbose=0).history["loss"][0]


def train_often(count, is_same_model, runner):
    x, y = data()
    losses, found, begin = [], [], time.monotonic()
    model = make_model(runner)
    for number in range(1, count + 1):
        if not is_same_model and number > 1:
            model = make_model(runner)
        losses += runner.fit(model, x, y, batch_size=16, epochs=1, verbose=0).history["loss"]
        if number in MARKS or number == count:
            found.append(held(number, begin))
    return losses, found


def main():
    backend, num_devices, what, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    choices = {"backend": backend, "num_devices": num_devices, "device": "cpu", "verbose": 0}
    if what == "launches":
        losses, found, begin = [], [], time.monotonic()
        for number in range(1, count + 1):
            losses.append(kerasdp.launch(train_once, **choices))
            if number in MARKS or number == count:
                found.append(held(number, begin))
    else:
        import functools

        train = functools.partial(train_often, count, what == "fits")
        losses, found = kerasdp.launch(train, **choices)
    print("RESULT " + json.dumps({"losses": losses, "held": found}))


if __name__ == "__main__":
    main()
