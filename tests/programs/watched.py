"""Trains a small model, and waits in the middle of it until it is told to continue; prints the losses of the steps.

python watched.py SETTINGS: fields of kerasdp.Config as JSON, and
    folder: of the files that say where the run is: `begun-RANK` as soon as its processes have joined, `middle-RANK`
        after step 3, where it waits for the file `continue`
    data: `arrays`, or `loader` (a DataLoader of torch with two workers)
"""

import json
import pathlib
import sys
import tempfile
import time

import numpy as np

import kerasdp

tempfile.tempdir = None  # where this program runs in a process that had another one
ROWS, BATCH = 320, 8
X = np.random.RandomState(0).randn(ROWS, 4).astype("float32")
Y = (X.sum(1) > 0).astype("int32")


def batches(kind):
    """x and y of `fit`."""
    if kind == "arrays":
        return X, Y
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(rows, BATCH, num_workers=2, prefetch_factor=1), None


def train(runner, settings):
    import keras
    from learn_classes import StepLosses

    folder, rank = pathlib.Path(settings["folder"]), runner.strategy.processes.rank
    (folder / f"begun-{rank}").touch()

    class Waits(keras.callbacks.Callback):
        num_steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.num_steps += 1
            if self.num_steps == 3:
                (folder / f"middle-{rank}").touch()
                while not (folder / "continue").exists():
                    time.sleep(0.05)

    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = batches(settings.get("data", "arrays"))
    losses = StepLosses(runner)
    options = {} if settings.get("data") == "loader" else {"batch_size": BATCH}
    runner.fit(model, x, y, epochs=1, verbose=0, callbacks=[losses, Waits()], **options)
    return losses.values


def main():
    settings = json.loads(sys.argv[1])
    fields = {name: value for name, value in settings.items() if name not in ("folder", "data")}
    try:
        losses = kerasdp.launch(lambda runner: train(runner, settings), device="cpu", verbose=0, seed=0, **fields)
    except kerasdp.RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print("RESULT", json.dumps(losses))


if __name__ == "__main__":
    main()
