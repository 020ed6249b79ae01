"""Trains on samples that are computed when they are read, few or a thousand million, and resumes within the epoch.

Arguments: backend, devices, folder, and numbers of samples. Prints, for each of them, the seconds from the call of
`fit` to its first batch, and how far the most memory that this process ever had grew, in MiB; for a new run, and for
one that resumes in the middle of the epoch.
"""

import functools
import json
import os
import resource
import sys
import time

import numpy as np

import kerasdp

BATCH, STEPS = 64, 3


class Computed:
    """Rows that are a function of their number."""

    num_threads = 2

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def inputs(self, indices):
        return np.sin(indices[:, None] * np.arange(1.0, 5.0)).astype("float32")

    def targets(self, indices):
        return (indices[:, None] % 7).astype("float32"), None


def train(runner, num_samples):
    import keras

    began, batches = [], []  # not of the callback, whose attributes a checkpoint holds

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            began.append(time.perf_counter())
            batches.append(batch)

    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    samples, after_step = [], runner.state.after_step

    def after(loss, indices, *rest):
        samples.append(np.asarray(indices)[:3].tolist())
        after_step(loss, indices, *rest)

    runner.state.after_step = after
    data, begin = Computed(num_samples), time.perf_counter()
    runner.fit(model, data, epochs=2, validation_data=Computed(num_samples), validation_steps=2, callbacks=[Watch()])
    return {"seconds": began[0] - begin, "batches": batches, "samples": samples}


def move_to_middle(folder, num_samples):
    """Lets the newest checkpoint be one of the middle of the epoch."""
    from kerasdp.checkpoint import files

    path, saved = files.load_newest(os.path.join(folder, "checkpoints"), print)
    middle = -(-num_samples // BATCH) // 2
    state = {**saved.state, "batch": middle, "step": middle}
    os.remove(path)
    files.save(files.path_of(os.path.dirname(path), middle), files.Checkpoint(arrays=saved.arrays, state=state))
    return middle


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    backend, count, folder, *numbers = sys.argv[1:]
    found = {}
    for number in map(int, numbers):
        place = os.path.join(folder, str(number))
        fields = {"backend": backend, "num_devices": int(count), "device": "cpu", "verbose": 0, "batch_size": BATCH}
        before, middle = peak(), 0
        for name in ("new", "resumed"):
            if name == "resumed":
                middle = move_to_middle(place, number)
            config = kerasdp.Config(
                **fields, workdir=place, checkpoint_every="1", max_steps=middle + STEPS, resume=name == "resumed"
            )
            result = kerasdp.launch(functools.partial(train, num_samples=number), config)
            found[f"{name}, {number}"] = {**result, "grown": peak() - before, "middle": middle}
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
