"""Measures what `--reduce` costs: time of a step and memory, where gradients are added on the devices and by the host.

    python benchmarks/reduce.py --backend=torch
    python benchmarks/reduce.py --backend=tensorflow --devices=4

Trains a net of three dense layers, with 23 MB of gradients, on `--devices` devices, each way in processes of its own.
Prints for each way the median time of a step, and the most memory of the process that needs most, or on GPUs of the
device. Virtual CPU devices are in host memory, so there nothing is freed.
"""

import argparse
import statistics
from typing import Any

import numpy as np
import protocol

import kerasdp


def train(runner: Any, num_steps: int) -> tuple[float, int]:
    """Returns the median seconds of a step, and bytes."""
    import keras

    with runner.scope():
        layers = [keras.layers.Dense(2048, "relu"), keras.layers.Dense(2048, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((784,)), *layers])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random, num_rows = np.random.RandomState(0), runner.config.batch_size * num_steps
    x, y = random.rand(num_rows, 784).astype("float32"), random.randint(0, 10, num_rows)
    seconds = protocol.seconds_of_steps(runner, model, x, y)
    memory = max(runner.strategy.processes.all_gather_object(runner.strategy.peak_memory_bytes()))
    return statistics.median(seconds), memory


def main() -> None:
    """Measures all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch", choices=["torch", "tensorflow"])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    steps = arguments.steps
    for reduce in (None, "device", "host"):
        # With a time limit, a run has processes of its own.
        seconds, memory = kerasdp.launch(
            lambda runner: train(runner, steps), backend=arguments.backend, num_devices=arguments.devices,
            batch_size=64, reduce=reduce, verbose=0, hang_timeout=600,
        )  # fmt: skip
        print(f"{reduce or 'default':<8} {1000 * seconds:8.1f} ms a step {memory / 2**20:8.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
