"""Counts, in a custom loop in float64, what is compiled, and gives the mean of its losses so far.

python compiled_loop.py BACKEND COMPILE
"""

import sys

import numpy as np
from starting import printed

import kerasdp


def programs_of_jax():
    """The seconds that JAX compiled each program, from now on."""
    import jax

    seconds = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds


def train(runner):
    import keras

    compiled = programs_of_jax() if runner.config.backend == "jax" else []
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer, mean = keras.optimizers.SGD(0.01), keras.metrics.Mean()
    calls = []

    @runner.step
    def step(x):
        calls.append(x)
        loss_of = kerasdp.value_and_grad(lambda: keras.ops.mean(keras.ops.square(model(x))), model.trainable_variables)
        loss, gradients = loss_of()
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(loss)
        return mean.result()

    means, num_calls, num_compiled = [], [], []
    for batch in runner.batches(np.ones((32, 4)), batch_size=8, epochs=2):
        means.append(float(step(batch)))
        num_calls.append(len(calls))
        num_compiled.append(len(compiled))
    return {"means": means, "calls": num_calls, "compiled": num_compiled}


if __name__ == "__main__":
    name, compiled = sys.argv[1:]
    printed(train, name, compile=compiled, precision="float64")
