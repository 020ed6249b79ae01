"""Holds what the loops of this folder share: flags, data, and the protocol of repetitions.

A program sets up, compiles, warms up and prints a line of JSON, `{"ready": true, "seconds_to_first_step": ...}`. Each
line that it then reads asks for one repetition of `--steps` training steps, which it answers with a line of JSON,
`{"seconds": ..., "loss": ..., "accuracy": ..., "peak_memory_bytes": ...}`. It ends with its input.

So several programs can be measured in turn, as `recipes/benchmark.py` does; by hand:

    echo | python benchmarks/torch_loop.py --model=resnet18 --compile
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

STARTED = time.perf_counter()
LEARNING_RATE, MOMENTUM, NUM_CLASSES, NUM_SAMPLES, WARM_UP_STEPS = 0.01, 0.9, 10, 4096, 3


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the parser of the flags of all loops."""
    flags = argparse.ArgumentParser(description=description, allow_abbrev=False)
    flags.add_argument("--model", default="convnet", help="convnet, resnet18 or resnet50, as in kerasdp/models")
    flags.add_argument("--batch_size", type=int, default=64, help="samples a step, over all devices")
    flags.add_argument("--devices", type=int, default=1)
    flags.add_argument("--steps", type=int, default=20, help="training steps a repetition")
    flags.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--device", default="auto", choices=["auto", "cpu", "gpu"])
    flags.add_argument("--batch_norm", default="replica", choices=["replica", "sync"])
    return flags


def parse(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the flags that were given."""
    args = flags.parse_args()
    if args.batch_size % args.devices:
        flags.error(f"--batch_size: expected a multiple of the {args.devices} devices. Received: {args.batch_size}")
    if args.batch_size > NUM_SAMPLES:
        flags.error(f"--batch_size: expected at most {NUM_SAMPLES}. Received: {args.batch_size}")
    return args


def input_shape(model: str) -> tuple[int, int, int]:
    """Returns height, width and channels of the model's images."""
    return (32, 32, 3) if model == "resnet50" else (28, 28, 1)


def make_data(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Makes random images, uint8 `(samples, height, width, channels)`, and labels, int32 `(samples,)`."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (NUM_SAMPLES, *input_shape(model)), "uint8")
    return images, random.integers(0, NUM_CLASSES, NUM_SAMPLES, "int32")


def batches(batch_size: int) -> Iterator[np.ndarray]:
    """Yields the indices of batch after batch; the samples are shuffled for each epoch."""
    random = np.random.default_rng(1)
    while True:
        order = random.permutation(NUM_SAMPLES).astype("int32")
        for start in range(0, NUM_SAMPLES - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def peak_memory() -> int:
    """Returns the most memory that this process has used, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def say(**values: Any) -> None:
    """Prints a line of JSON."""
    print(json.dumps(values), flush=True)


def serve(
    repeat: Callable[[int], dict[str, float]],
    steps: int,
    *,
    parameters: int,
    device: str,
    lines: Iterable[str] = sys.stdin,
    say: Callable[..., None] = say,
) -> None:
    """Warms up, and runs a repetition for each line.

    Args:
        repeat: trains so many steps, waits for the end, and returns loss, accuracy and peak memory (and seconds, if it
            knows better).
        steps: of a repetition.
        parameters: trainable numbers of the model.
        device: its name.
        lines: one asks for a repetition.
        say: prints.
    """
    repeat(1)
    seconds = time.perf_counter() - STARTED
    repeat(WARM_UP_STEPS)
    say(ready=True, seconds_to_first_step=seconds, parameters=parameters, device=device)
    for _ in lines:
        start = time.perf_counter()
        result = repeat(steps)
        say(**{"seconds": time.perf_counter() - start} | result)
