"""Measures how well the stages of a pipeline overlap: two stages that only wait, so that shared cores do not count.

    python benchmarks/pipeline_overlap.py                 # all installed backends and their schedules
    python benchmarks/pipeline_overlap.py torch jax

Each stage waits 50 ms in the forward and 50 ms in the backward pass of a micro-batch. Then a step of M micro-batches in
two stages takes 100 ms * (M + 1) at best, and 200 ms * M without overlap. Prints the median of a step, and its ratio
to the best.

Measured on 2 CPU cores with Keras 3.15.1, torch 2.13.0, jax 0.10.2, tensorflow-cpu 2.21: 1.01 to 1.04 times the
best, in all 15 lines.
"""

import functools
import statistics
import sys
import threading
import time
from typing import Any

import numpy as np

import kerasdp
from kerasdp.runtime.devices import is_installed
from kerasdp.runtime.workers import call_in_new_process

SECONDS, NUM_STAGES, NUM_STEPS = 0.05, 2, 3
SCHEDULES = {"torch": ("gpipe", "1f1b"), "jax": ("gpipe", "1f1b"), "tensorflow": ("gpipe", "1f1b")}


def wait_torch(x: Any, _: Any) -> Any:
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


def wait_jax(x: Any, _: Any) -> Any:
    """Returns `x` after a while, and its gradient likewise."""
    import jax

    def sleep(x: Any) -> Any:
        def run(value: Any) -> Any:
            time.sleep(SECONDS)
            return np.asarray(value)

        return jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    wait = jax.custom_vjp(sleep)
    wait.defvjp(lambda x: (sleep(x), None), lambda _, gradient: (sleep(gradient),))
    return wait(x)


def wait_tensorflow(x: Any, lock: Any) -> Any:
    """Returns `x` after a while, and its gradient likewise."""
    import tensorflow as tf

    def run(value: Any) -> Any:
        with lock:  # a device does one thing at a time
            time.sleep(SECONDS)
        return value

    def sleep(x: Any) -> Any:
        waited = tf.numpy_function(run, [x], x.dtype, stateful=False)
        waited.set_shape(x.shape)
        return waited

    return tf.custom_gradient(lambda x: (sleep(x), sleep))(x)


def train(num_micro_batches: int, runner: "kerasdp.Runner") -> float:
    """Returns the median seconds of a step."""
    import keras

    wait = {"torch": wait_torch, "jax": wait_jax, "tensorflow": wait_tensorflow}[runner.config.backend]

    class Wait(keras.layers.Layer):
        """A weight, so that there is something to train, and a while."""

        def __init__(self, name: str):
            super().__init__(name=name)
            self.lock = threading.Lock()

        def build(self, shape: Any) -> None:
            self.weight = self.add_weight((), "ones", name="weight")

        def call(self, x: Any) -> Any:
            return wait(x * self.weight, self.lock)

        def compute_output_spec(self, x: Any) -> Any:
            return keras.KerasTensor(x.shape, x.dtype)

    x = np.ones((num_micro_batches * NUM_STEPS, 4), "float32")
    with runner.scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, Wait("second")(Wait("first")(inputs)))
        model.compile("sgd", "mse")
    runner.fit(model, x, x, batch_size=num_micro_batches, epochs=4)
    return statistics.median(runner.epoch_seconds[1:]) / NUM_STEPS


def main() -> None:
    """Prints a line for each backend, schedule and number of micro-batches."""
    for backend in sys.argv[1:] or [name for name in SCHEDULES if is_installed(name)]:
        for schedule in SCHEDULES[backend]:
            for num_micro_batches in (2, 4, 8):
                settings = kerasdp.Config(
                    backend=backend, device="cpu", strategy="pipeline", num_stages=NUM_STAGES, cut_at="first",
                    num_devices=NUM_STAGES, pipeline_schedule=schedule, split_size="1", verbose=0,
                )  # fmt: skip
                work = functools.partial(train, num_micro_batches)
                seconds = call_in_new_process(kerasdp.launch, work, settings, name=backend)
                best = 2 * SECONDS * (num_micro_batches + NUM_STAGES - 1)
                print(
                    f"{backend:10} {schedule:6} {num_micro_batches} micro-batches: {seconds:.3f} s a step, "
                    f"{seconds / best:.2f} x the best possible {best:.1f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
