"""Measures what a run costs besides training: logs, progress bar, checkpoints, evaluation.

    python benchmarks/overheads.py --backend=torch
    python benchmarks/overheads.py --backend=jax --model=resnet18 --steps=5

One model is trained in turn without anything, and with one thing at a time, a short epoch each, all in one process.
Prints the median over the rounds of the ratio of each one's seconds to those of the bare epoch in the same round. It is
the training part of an epoch that counts: an evaluation is work that was asked for, and at an epoch's end a run with
a workdir draws its curves, which takes 0.1 to 0.2 s. A checkpoint is written each 50 steps.

The figures of 2 CPU cores stand in the README.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import tempfile
from typing import Any

import numpy as np

import kerasdp

WAYS: dict[str, dict[str, Any]] = {
    "bare": {},
    "a line each step": {"log_every": 1, "workdir": "lines"},
    "progress bar": {"verbose": 1},
    "a checkpoint each 50 steps": {"checkpoint_every": "50", "workdir": "checkpoints"},
    "evaluation": {},
}


def train(model_name: str, folder: str, steps: int, rounds: int, runner: "kerasdp.Runner") -> None:
    """Runs in every worker."""
    import keras

    config = runner.config
    numbers = np.random.default_rng(0)
    count = config.batch_size * steps
    x, y = numbers.integers(0, 256, (count, 28, 28, 1), "uint8"), numbers.integers(0, 10, count)
    with runner.scope():
        model = kerasdp.build_model(model_name, x.shape[1:], 10)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(rounds + 1):  # the first compiles
        for name, changes in WAYS.items():
            runner.config = dataclasses.replace(config, **changes)
            if runner.config.workdir is not None:
                runner.config = dataclasses.replace(runner.config, workdir=os.path.join(folder, f"{name} {number}"))
            validation = (x[:64], y[:64]) if name == "evaluation" else None
            # The bar is drawn, and thrown away.
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                runner.fit(model, x, y, epochs=1, validation_data=validation)
            seconds[name].append(runner.state.epoch_seconds[-1])
    if runner.is_chief:
        bare = seconds["bare"][1:]
        print(f"{config.backend}, {model_name}: {statistics.median(bare) / steps * 1e3:.1f} ms a step")
        for name in list(WAYS)[1:]:
            ratios = sorted(own / other for own, other in zip(seconds[name][1:], bare))
            print(f"{name:28} {statistics.median(ratios):.3f}   ({ratios[0]:.3f} .. {ratios[-1]:.3f})")


def main() -> None:
    """Starts the run."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--backend")
    flags.add_argument("--model", default="convnet")
    flags.add_argument("--gpus", type=int)
    flags.add_argument("--batch_size", type=int, default=64)
    flags.add_argument("--steps", type=int, default=100)
    flags.add_argument("--rounds", type=int, default=7)
    args = flags.parse_args()
    backend = args.backend or kerasdp.Config().backend
    config = kerasdp.Config(
        backend=backend, num_devices=args.gpus, batch_size=args.batch_size, verbose=0,
        checkpoint_every="never", compile="on" if backend == "torch" else "auto",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        kerasdp.launch(functools.partial(train, args.model, folder, args.steps, args.rounds), config)


if __name__ == "__main__":
    main()
