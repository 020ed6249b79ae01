"""Trains on large batches of a generator, which process 0 hands out to the others.

python large_batches.py FOLDER FIELDS: of the files `step-RANK`, which hold the number of the last step; and fields of
kerasdp.Config as JSON.
"""

import json
import pathlib
import sys

import numpy as np

import kerasdp

ROWS, WIDTH = 48, 530_000  # 102 MB in float32


def train(runner, folder):
    import keras

    rank = runner.strategy.processes.rank
    batch = np.ones((ROWS, WIDTH), "float32"), np.zeros((ROWS, 1), "float32")

    def batches():
        while True:
            yield batch

    def note(number, logs=None):
        (folder / f"step-{rank}").write_text(str(number))

    with runner.scope():
        inputs = keras.Input((WIDTH,))
        means = keras.ops.mean(inputs, axis=1, keepdims=True)  # few weights, so that the batches are what is sent
        model = keras.Model(inputs, keras.layers.Dense(1)(means))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    runner.fit(model, batches(), epochs=1, steps_per_epoch=10_000, verbose=0, callbacks=[callback])


if __name__ == "__main__":
    folder, fields = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    try:
        kerasdp.launch(lambda runner: train(runner, folder), device="cpu", num_devices=1, verbose=0, **fields)
    except kerasdp.RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
