"""Measures how well the stages of a pipeline overlap: two stages that only wait, so that shared cores do not count.

    python benchmarks/pipeline_overlap.py

Each stage waits 50 ms in the forward and 50 ms in the backward pass of a micro-batch. Then a step of M micro-batches in
two stages takes 100 ms * (M + 1) at best, and 200 ms * M without overlap. Prints the median of a step, and its ratio
to the best.

Measured on 2 CPU cores with Keras 3.15.1, torch 2.13.0: 1.01 to 1.04 times the best, in all lines.
"""

import functools
import statistics
import time
from typing import Any

import numpy as np

import kerasdp
from kerasdp.processes.workers import run_workers

SECONDS, NUM_STAGES, NUM_STEPS = 0.05, 2, 3


def wait(x: Any) -> Any:
    """Returns `x` after a while, and its gradient likewise."""
    import torch

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            time.sleep(SECONDS)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(SECONDS)
            return gradient

    return x.clone() if x.device.type == "meta" else Wait.apply(x)


def train(num_micro_batches: int, runner: "kerasdp.Runner") -> float:
    """Returns the median seconds of a step."""
    import keras

    class Wait(keras.layers.Layer):
        """A weight, so that there is something to train, and a while."""

        def build(self, shape: Any) -> None:
            self.weight = self.add_weight((), "ones", name="weight")

        def call(self, x: Any) -> Any:
            return wait(x * self.weight)

        def compute_output_spec(self, x: Any) -> Any:
            return keras.KerasTensor(x.shape, x.dtype)

    x = np.ones((num_micro_batches * NUM_STEPS, 4), "float32")
    with runner.scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, Wait(name="second")(Wait(name="first")(inputs)))
        model.compile("sgd", "mse")
    runner.fit(model, x, x, batch_size=num_micro_batches, epochs=4)
    return statistics.median(runner.state.epoch_seconds[1:]) / NUM_STEPS


def main() -> None:
    """Prints a line for each number of micro-batches."""
    for num_micro_batches in (2, 4, 8):
        settings = kerasdp.Config(
            backend="torch", device="cpu", strategy="pipeline", cut_at="first", num_devices=NUM_STAGES,
            split_size=1, verbose=0,
        )  # fmt: skip
        work = functools.partial(train, num_micro_batches)
        seconds = run_workers(kerasdp.launch, (work, settings), names=["torch"])
        best = 2 * SECONDS * (num_micro_batches + NUM_STAGES - 1)
        print(
            f"{num_micro_batches} micro-batches: {seconds:.3f} s a step, "
            f"{seconds / best:.2f} x the best possible {best:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
