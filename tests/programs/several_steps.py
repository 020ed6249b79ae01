"""Trains with several steps a call, and prints what came out.

python several_steps.py BACKEND NUM_DEVICES STEPS MAX_STEPS WORKDIR
"""

import functools
import json
import os
import sys

import numpy as np
from starting import printed


def train(steps_per_execution, runner):
    import keras

    numbers = np.random.RandomState(0)
    x, y = numbers.rand(61, 6, 6, 1).astype("float32"), numbers.randint(0, 3, 61)
    with runner.scope():
        layers = keras.layers
        parts = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten()]
        model = keras.Sequential([keras.Input(x.shape[1:]), *parts, layers.Dropout(0.3), layers.Dense(3)])
        model.compile(
            keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5), momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
    runner.fit(model, x, y, epochs=3, validation_data=(x[:20], y[:20]))
    outputs = runner.predict(model, x)
    with open(os.path.join(runner.config.workdir, "steps.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    with open(os.path.join(runner.config.workdir, "history.csv")) as file:
        history = file.read().splitlines()
    return {
        "losses": [line["loss"] for line in lines],
        "rates": [line["learning_rate"] for line in lines],
        "speeds": [line["images_per_second"] for line in lines],
        "steps": [line["step"] for line in lines],
        "history": [[float(value) for value in line.split(",")[:-2]] for line in history[1:]],
        "outputs": outputs.tolist(),
        "checkpoints": sorted(os.listdir(os.path.join(runner.config.workdir, "checkpoints"))),
    }


if __name__ == "__main__":
    backend, count, steps, end, workdir = sys.argv[1:]
    files = {"checkpoint_every": "3", "keep": 100, "log_every": 1, "workdir": workdir, "resume": True}
    printed(functools.partial(train, int(steps)), backend, count, batch_size=8, max_steps=int(end) or None, **files)
