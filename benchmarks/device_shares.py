"""Measures what unequal shares of a batch gain where the second of two devices is slower than the first.

    python benchmarks/device_shares.py --backend=torch --slower=3
    python benchmarks/device_shares.py --backend=tensorflow --slower=3

A device computes by waiting, 0.5 ms a sample, the second one `--slower` times as long: virtual devices share the cores,
so that none is slower, and this shows what the shares do, whatever else the machine does. Prints for each way to share
the median time of a step, and how many times as fast that is as equal shards.
"""

import argparse
import os
import statistics
import time
from typing import Any

import numpy as np
import protocol

import kerasdp

SECONDS_A_SAMPLE, BATCH = 0.0005, 64


def wait_layer(slower: float) -> Any:
    """Returns a layer that takes as long as a device would."""
    import keras

    def wait(num_rows: int, rank: int) -> None:
        time.sleep(num_rows * SECONDS_A_SAMPLE * (slower if rank else 1.0))

    class Wait(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            rows = inputs.shape[0]
            if keras.backend.backend() == "torch":
                wait(rows or 0, int(os.environ.get("RANK", 0)))
                return inputs
            import tensorflow as tf

            context = tf.distribute.get_replica_context()
            if rows is None or context is None:
                return inputs
            rank = int(tf.get_static_value(context.replica_id_in_sync_group))

            def waited(values: Any) -> Any:
                wait(rows, rank)
                return values

            # Those of a state would be called in turns.
            outputs = tf.numpy_function(waited, [inputs], inputs.dtype, stateful=False)
            outputs.set_shape(inputs.shape)
            return inputs + tf.stop_gradient(outputs - inputs)

    return Wait()


def train(runner: Any, slower: float, num_steps: int) -> dict[str, Any]:
    """Returns the seconds of each step, and the shares."""
    import keras

    with runner.scope():
        layers = [wait_layer(slower), keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((28, 28, 1)), *layers])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.RandomState(0)
    x, y = random.rand(BATCH * num_steps, 28, 28, 1).astype("float32"), random.randint(0, 10, BATCH * num_steps)
    seconds = protocol.seconds_of_steps(runner, model, x, y, shuffle=False)
    return {"seconds": seconds, "shares": runner.strategy.split.shares}


def main() -> None:
    """Measures all ways to share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="torch", choices=["torch", "tensorflow"])
    parser.add_argument("--slower", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    first, slower, steps = None, arguments.slower, arguments.steps
    for shares in (None, f"{slower},1", "auto"):
        found = kerasdp.launch(
            lambda runner: train(runner, slower, steps), backend=arguments.backend, num_devices=2,
            device="cpu", batch_size=BATCH, device_shares=shares, check="off", verbose=0,
        )  # fmt: skip
        median = statistics.median(found["seconds"])
        first = first or median
        rows = "equal" if shares is None else f"{shares} ({found['shares'][0]},{found['shares'][1]})"
        print(f"{rows:<16} {1000 * median:8.1f} ms a step   {first / median:.2f} times as fast", flush=True)


if __name__ == "__main__":
    main()
