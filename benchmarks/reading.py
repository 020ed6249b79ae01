"""Measures how fast batches reach the devices, against a plain loop over the same object.

    python benchmarks/reading.py --backend=torch --num_devices=2

Each object reads 28 x 28 images and changes them as people do (scale, flip, noise). First a loop that only iterates
it, then the feed of kerasdp, which reads, hands out and brings batches to the devices, while nothing is trained; in
turns, and the medians of their ratios count.
"""

import os
import statistics
import sys
import time

import numpy as np
from absl import app, flags

_BACKEND = flags.DEFINE_string("backend", "torch", "torch, jax or tensorflow.")
_NUM_DEVICES = flags.DEFINE_integer("num_devices", 2, "Devices.")
_BATCH = flags.DEFINE_integer("batch_size", 128, "Rows of a batch.")
_ROWS = flags.DEFINE_integer("rows", 25_600, "Rows of a pass.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Passes of each.")


def changed(image, label):
    """Returns an image as it is trained on."""
    image = image.astype("float32") / 255
    if label % 2:
        image = image[:, ::-1]
    return np.clip(image + np.float32(0.01) * np.roll(image, int(label), 0), 0, 1), label


def tf_data(images, labels, batch_size):
    """tf.data, in its own operations."""
    import tensorflow as tf

    def change(image, label):
        image = tf.cast(image, tf.float32) / 255
        image = tf.where(label % 2 == 1, image[:, ::-1], image)
        return tf.clip_by_value(image + 0.01 * tf.roll(image, label, 0), 0, 1), label

    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=1)
    return data.map(change).batch(batch_size).prefetch(2)


def data_loader(images, labels, batch_size):
    """A torch DataLoader with a worker process."""
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(images)

        def __getitem__(self, index):
            return changed(images[index], labels[index])

    return torch.utils.data.DataLoader(Rows(), batch_size, shuffle=True, num_workers=1)


def generator(images, labels, batch_size):
    """A generator function's object, made again for each pass."""

    class Batches:
        def __iter__(self):
            order = np.random.permutation(len(images))
            for first in range(0, len(images), batch_size):
                rows = [changed(images[row], labels[row]) for row in order[first : first + batch_size]]
                yield tuple(np.stack(column) for column in zip(*rows, strict=True))

    return Batches()


def grain(images, labels, batch_size):
    """A Grain MapDataset."""
    import grain

    data = grain.MapDataset.range(len(images)).seed(1).shuffle()
    return data.map(lambda row: changed(images[row], labels[row])).batch(batch_size)


def py_dataset(images, labels, batch_size):
    """A Keras PyDataset."""
    import keras

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-len(images) // batch_size)

        def __getitem__(self, index):
            rows = range(index * batch_size, min((index + 1) * batch_size, len(images)))
            parts = [changed(images[row], labels[row]) for row in rows]
            return tuple(np.stack(column) for column in zip(*parts, strict=True))

    return Batches()


KINDS = (tf_data, data_loader, generator, grain, py_dataset)


def bare(data):
    """Returns the seconds of a loop over an object."""
    begin = time.perf_counter()
    for _ in data if hasattr(data, "__iter__") else (data[place] for place in range(len(data))):
        pass
    return time.perf_counter() - begin


def fed(runner, data):
    """Returns the seconds in which all batches reached the devices."""
    from kerasdp.data.batch import Feed
    from kerasdp.training.readers import make_reader

    reader = make_reader(runner.config, runner.strategy, runner.devices, data, None, None, 1)
    feed = Feed(reader, runner.strategy.shard_batch)
    begin = time.perf_counter()
    for _ in feed:
        pass
    feed.close()
    return time.perf_counter() - begin


def train(runner, batch_size, rows, rounds):
    """Returns rows a second of each kind: of the loop, of the feed, and the median of their ratios."""
    random, found = np.random.RandomState(0), {}
    images, labels = random.randint(0, 256, (rows, 28, 28, 1)).astype("uint8"), random.randint(0, 10, rows)
    for make in KINDS:
        times = []
        for _ in range(rounds + 1):
            # The loop where the feed reads; elsewhere nobody computes beside it.
            alone = bare(make(images, labels, batch_size)) if runner.is_chief else 0.0
            runner.strategy.processes.any_rank(False)
            times.append((alone, fed(runner, make(images, labels, batch_size))))
        alone, together = (statistics.median(column) for column in zip(*times[1:], strict=True))
        ratio = statistics.median(one / other for one, other in times[1:])
        found[make.__name__] = rows / alone if alone else 0, rows / together, ratio
    return found


def main(_):
    """Prints a table."""
    import functools

    import kerasdp

    os.environ["KERAS_BACKEND"] = _BACKEND.value
    work = functools.partial(train, batch_size=_BATCH.value, rows=_ROWS.value, rounds=_ROUNDS.value)
    found = kerasdp.launch(work, backend=_BACKEND.value, num_devices=_NUM_DEVICES.value)
    print(f"{'':12}{'loop':>12}{'kerasdp':>12}{'ratio':>8}   (rows a second, {_BACKEND.value} x {_NUM_DEVICES.value})")
    for name, (alone, together, ratio) in found.items():
        print(f"{name:12}{alone:12,.0f}{together:12,.0f}{ratio:8.2f}")


if __name__ == "__main__":
    sys.exit(app.run(main))
