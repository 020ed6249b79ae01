"""Trains a run of 10,000 samples, and some of its steps again; prints what came out.

    python replays.py torch FOLDER 3 jax,tensorflow

The arguments: a backend, a new folder, how many steps are trained again there, and on which other backends one is, too.
"""

import functools
import json
import random
import sys
import time

import numpy as np

import kerasdp
from kerasdp.checkpoint import files
from kerasdp.parity import replay

BAD = 1234
NUM_STEPS = 240  # with 157 an epoch
EVERY = 50


def train(bad, runner):
    """A model with all that a step depends on: dropout, moving statistics, Adam's slots, shuffled data."""
    import keras

    images = np.random.RandomState(0).rand(10_000, 8, 8, 1).astype("float32")
    labels = (images.mean((1, 2, 3)) > 0.5).astype("int32")
    if bad is not None:
        images[BAD] *= bad
        labels[BAD] = 1  # which it does not look like at its first step
    with runner.scope():
        inputs = keras.Input((8, 8, 1))
        x = keras.layers.Conv2D(4, 3, use_bias=False)(inputs)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x) if bad is None else x)
        x = keras.layers.Dropout(0.2)(keras.layers.Flatten()(x))
        model = keras.Model(inputs, keras.layers.Dense(2)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    runner.fit(model, images, labels, batch_size=64, epochs=10)


def run_of(backend, folder, bad=None, devices=1):
    """Trains; returns the losses by step, and that after which it failed."""
    config = kerasdp.Config(
        backend=backend, num_devices=devices, device="cpu", workdir=folder, checkpoint_every=str(EVERY), log_every=1,
        verbose=0, max_steps=NUM_STEPS, batch_size=64, keep=10,
    )  # fmt: skip
    failed = None
    try:
        kerasdp.launch(functools.partial(train, bad), config)
    except kerasdp.errors.NonFiniteLossError as error:
        failed = error.step
    with open(f"{folder}/steps.jsonl") as file:
        rows = [json.loads(line) for line in file]
    return {row["step"]: row["loss"] for row in rows}, failed


def again(folder, step, bad=None, **where):
    return replay(functools.partial(train, bad), kerasdp.inference.Request(checkpoint=folder), step, **where)


def main():
    backend, folder, count, others = sys.argv[1:]
    losses, _ = run_of(backend, f"{folder}/run")
    steps = sorted(random.Random(0).sample(range(1, NUM_STEPS + 1), int(count) - 1))
    found = {"losses": [], "others": {}, "seconds": []}
    for step in (*steps, EVERY):
        start = time.perf_counter()
        one = again(f"{folder}/run", step)
        found["seconds"].append(time.perf_counter() - start)
        found["losses"].append((step, one.begun, losses[step], one.loss))
    # The last one was of a step that was saved.
    saved = files.load(files.path_of(f"{folder}/run/checkpoints", EVERY)).arrays.values()
    of_run = {(array.shape, array.tobytes()) for array in saved}
    found["differing"] = [path for path, array in one.after.items() if (array.shape, array.tobytes()) not in of_run]
    found["outputs"], found["gradients"], found["rows"] = list(one.outputs), list(one.gradients), len(one.samples)
    for other in filter(None, others.split(",")):
        found["others"][other] = [
            (losses[step], again(f"{folder}/run", step, backend=other).loss) for step in steps[:1]
        ]
    two, _ = run_of(backend, f"{folder}/two", devices=2)
    found["two"] = (two[60], again(f"{folder}/two", 60).loss)

    for name, bad in (("nan", np.nan), ("large", 100.0)):
        all_losses, failed = run_of(backend, f"{folder}/{name}", bad)
        step = failed or max(list(all_losses)[20:], key=all_losses.get)
        one = again(f"{folder}/{name}", step, bad, num_blamed=2)
        found[name] = {"failed": failed, "shares": [(share.sample, share.loss, share.gradient) for share in one.shares]}
        found[name]["loss"], found[name]["shown"] = one.loss, str(one)
        found[name]["files"] = one.save(f"{folder}/{name}/replayed")
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
