"""Trains one model on each kind of object that gives batches, and prints the loss of each step and what was read.

Arguments: fields of `kerasdp.Config` in JSON, and names of `KINDS`. The expected losses come from plain NumPy, which
reads an object made in the same way.
"""

import json
import os
import sys

import numpy as np

ROWS, BATCH, EPOCHS = 29, 8, 3  # the last batch of an epoch has five rows
STEPS, RATE = 4, 0.05
X = np.random.RandomState(0).randn(ROWS, 3)
Y = X @ [[1.0], [-2.0], [0.5]] + np.random.RandomState(1).randn(ROWS, 1)


def tf_data():
    """Shuffled with the run's seed, in another order in each epoch."""
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(BATCH).prefetch(2), {}


def tf_data_without_end():
    """Its epochs are of six steps: other than its passes of four."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=3).batch(BATCH).repeat()
    return data, {"steps_per_epoch": 6}


def data_loader(**options):
    import torch

    class Rows(torch.utils.data.Dataset):
        """Of the script, so that only a process that is forked knows it."""

        def __len__(self):
            return ROWS

        def __getitem__(self, place):
            return X[place], Y[place]

    return torch.utils.data.DataLoader(Rows(), BATCH, shuffle=True, **options), {}


def data_loader_with_workers():
    return data_loader(num_workers=2)


def data_loader_with_generator():
    import torch

    return data_loader(generator=torch.Generator().manual_seed(5))


def generator():
    """Gives each batch once."""

    def batches():
        random = np.random.RandomState(4)
        while True:
            order = random.permutation(ROWS)
            for first in range(0, ROWS, BATCH):
                yield X[order[first : first + BATCH]], Y[order[first : first + BATCH]]

    return batches(), {"steps_per_epoch": STEPS}


class batches_of_different_sizes:
    """With sample weights, from a custom class."""

    def __new__(cls):
        return super().__new__(cls), {}

    def __iter__(self):
        yield X[:6], Y[:6], np.linspace(0, 1, 6)
        yield X[6:7], Y[6:7], np.ones(1)
        yield X[7:], Y[7:], np.ones(22)


def grain_map_dataset():
    import grain

    data = grain.MapDataset.range(ROWS).seed(2).shuffle().map(lambda place: (X[place], Y[place]))
    return data.batch(BATCH), {}


def grain_iter_dataset():
    """Its iterator has a state; a stream over all epochs."""
    import grain

    data = grain.MapDataset.range(ROWS).seed(2).shuffle().repeat().map(lambda place: (X[place], Y[place]))
    return data.to_iter_dataset().batch(BATCH), {"steps_per_epoch": STEPS}


def py_dataset(**options):
    """Shuffled by the run, and once more by itself after each epoch."""
    import keras

    class Batches(keras.utils.PyDataset):
        def __init__(self):
            super().__init__(**options)
            self.random, self.order = np.random.RandomState(6), np.arange(ROWS)

        def __len__(self):
            return STEPS

        def __getitem__(self, index):
            rows = self.order[index * BATCH : (index + 1) * BATCH]
            return X[rows], Y[rows]

        def on_epoch_end(self):
            self.random.shuffle(self.order)

    return Batches(), {}


def py_dataset_with_threads():
    return py_dataset(workers=3, max_queue_size=5)


def hugging_face():
    import datasets

    import kerasdp

    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("numpy")
    return kerasdp.RecordSource(table, lambda row: (row["x"], row["y"])), {}


KINDS = (
    tf_data, tf_data_without_end, data_loader, data_loader_with_workers,
    data_loader_with_generator, generator, batches_of_different_sizes, grain_map_dataset, grain_iter_dataset,
    py_dataset, py_dataset_with_threads, hugging_face,
)  # fmt: skip


def expected_losses(make, seed=0):
    """The losses of linear regression by hand, on the batches as the object gives them in a loop."""
    from kerasdp.data import streams

    batches, options = make()
    kernel, losses = np.zeros((3, 1)), []
    stream = None
    for epoch in range(EPOCHS):
        if stream is None or "steps_per_epoch" not in options:
            if not hasattr(batches, "__next__"):
                streams.seed_pass(batches, seed, epoch)
            stream = iter(batches)
        for _ in range(options.get("steps_per_epoch", sys.maxsize)):
            item = next(stream, None)
            if item is None:
                break
            x, y, *weights = (np.asarray(part) for part in item)
            weight = weights[0][:, None] if weights else 1.0
            error = x @ kernel - y
            losses.append(float((weight * error**2).mean()))
            kernel -= RATE * 2 * x.T @ (weight * error) / len(x)
    return losses


def train(runner, names):
    import keras

    from kerasdp.keras_compat.settings import set_seed

    found = {}
    for name in names:
        set_seed(0)  # the seed of an object does not depend on those before it
        with runner.scope():
            inputs = keras.Input((3,))
            model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")(inputs))
            model.compile(keras.optimizers.SGD(RATE), "mse", weighted_metrics=[])
        batches, options = next(make for make in KINDS if make.__name__ == name)()
        runner.fit(model, batches, batch_size=BATCH, epochs=EPOCHS, verbose=0, shuffle=False, **options)
        folder = os.path.join(runner.config.workdir, f"fit-{runner._num_fits}" if runner._num_fits > 1 else "")
        if runner.is_chief:
            with open(os.path.join(folder, "steps.jsonl")) as file:
                found[name] = [json.loads(line)["loss"] for line in file]
    return found


if __name__ == "__main__":
    import functools

    import kerasdp

    fields, names = json.loads(sys.argv[1]), sys.argv[2:] or [make.__name__ for make in KINDS]
    settings = kerasdp.Config(precision="float64", log_every=1, **fields)
    print("RESULT", json.dumps(kerasdp.launch(functools.partial(train, names=names), settings)))
