"""Measures how fast batches arrive, without a model: from arrays, and from a folder of images.

    python benchmarks/feeding.py --backend=torch
    python benchmarks/feeding.py --backend=jax --gpus=2 --batch_size=256

Prints images a second of the feed alone; what ResNet-18, trained by the kit, consumes on these devices; and for the
folder, what the cores decode with nothing else to do. Medians of five.

Measured on 2 CPU cores with Keras 3.15.1, torch 2.13.0, jax 0.10.2, tensorflow-cpu 2.21:
torch 978,000 images/s from arrays and 6,500 from the folder (1.1 of what the cores decode), jax 224,000 and 6,400,
tensorflow 384,000 and 6,400; resnet18 consumes 64, 41 and 66.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import kerasdp

REPETITIONS, NUM_SAMPLES, NUM_IMAGES, SIZE, NUM_CLASSES = 5, 60_000, 600, (64, 64), 10


def rate(num_images: int, work: Any) -> float:
    """Images a second, the median of several times."""
    seconds = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return num_images / statistics.median(seconds)


def write_images(folder: str) -> None:
    """Writes JPEG files of 256x256 into a sub-folder per class."""
    from PIL import Image

    numbers = np.random.default_rng(0)
    for index in range(NUM_IMAGES):
        place = os.path.join(folder, f"class{index % NUM_CLASSES}")
        os.makedirs(place, exist_ok=True)
        coarse = Image.fromarray(numbers.integers(0, 256, (16, 16, 3), "uint8"))
        coarse.resize((256, 256)).save(os.path.join(place, f"{index}.jpg"), quality=90)


def train(folder: str, runner: "kerasdp.Runner") -> dict[str, float]:
    """Runs in every worker: images a second of each kind."""
    import keras

    from kerasdp.data.batch import Feed
    from kerasdp.data.sources import list_images, read_image

    config = runner.config
    numbers = np.random.default_rng(0)
    x = numbers.integers(0, 256, (NUM_SAMPLES, 28, 28, 1), "uint8")
    y = numbers.integers(0, NUM_CLASSES, NUM_SAMPLES)

    def all_of(source: Any) -> None:
        feed = Feed(runner._reader(source, None, None, config.batch_size, shuffle=True), runner.strategy.shard_batch)
        for _ in feed:
            pass

    found = {"arrays": rate(NUM_SAMPLES, lambda: all_of(kerasdp.ArraySource(x, y)))}
    paths, labels, _ = list_images(folder)
    read = functools.partial(read_image, size=SIZE, channels=3)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found["cores"] = rate(NUM_IMAGES, lambda: list(pool.map(read, paths)))
    records = kerasdp.RecordSource(
        list(zip(paths, labels)), lambda record: (read(record[0]), record[1]), num_threads=os.cpu_count() or 1
    )
    found["folder"] = rate(NUM_IMAGES, lambda: all_of(records))

    with runner.scope():
        model = kerasdp.build_model("resnet18", x.shape[1:], NUM_CLASSES)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    used = slice(0, config.batch_size * 3)
    runner.fit(model, x[used], y[used], epochs=4)
    found["resnet18"] = 3 * config.batch_size / statistics.median(runner.state.epoch_seconds[1:])
    return found


def main(folder: str, runner: "kerasdp.Runner") -> None:
    """Prints the figures."""
    found = train(folder, runner)
    if runner.is_chief:
        times = found["arrays"] / found["resnet18"]
        print(f"arrays             {found['arrays']:12,.0f} images/s")
        print(f"folder of images   {found['folder']:12,.0f} images/s, {found['folder'] / found['cores']:.2f} of what "
              f"the cores decode ({found['cores']:,.0f})")  # fmt: skip
        print(f"resnet18 consumes  {found['resnet18']:12,.0f} images/s: the arrays are {times:,.0f} times as fast")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_images(folder)
        flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        flags.add_argument("--backend")
        flags.add_argument("--gpus", type=int)
        flags.add_argument("--batch_size", type=int, default=64)
        args = flags.parse_args()
        settings = {"backend": args.backend, "num_devices": args.gpus, "batch_size": args.batch_size, "verbose": 0}
        kerasdp.launch(functools.partial(main, folder), **settings)
