"""Trains until something goes wrong on the last rank, in the way that MODE says.

python fail.py BACKEND NUM_DEVICES MODE WORKDIR
"""

import os
import signal
import sys
import time

import numpy as np

import kerasdp


def train(runner):
    import keras

    mode = os.environ["KERASDP_TEST_MODE"]
    last = runner.strategy.processes.rank == runner.strategy.processes.num_processes - 1

    class Trouble(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                print(f"READY {os.getpid()}", flush=True)
                if mode == "slow":
                    time.sleep(100)
            if batch != 3 or not last:
                return
            if mode == "raise":
                raise RuntimeError("the last rank gives up")
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "drift":
                drift(runner, self.model)
            if mode == "memory":
                keras.ops.zeros((10**7, 10**8))

    x, y = np.random.RandomState(0).randn(64, 4).astype("float32"), np.zeros(64, "int32")
    with runner.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    epochs = 100000 if mode == "wait" else 1
    runner.fit(model, x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[Trouble()])


def drift(runner, model):
    """Changes a weight on one replica alone."""
    weight = model.trainable_variables[0]
    if runner.config.backend == "torch":
        weight.assign(weight.value * 1.001)
    elif runner.config.backend == "tensorflow":
        copies = runner.strategy.mirrored.experimental_local_results(weight.value)
        copies[-1].assign(copies[-1] * 1.001)
    else:
        import jax

        model.jax_state_sync()
        shards = [shard.data for shard in weight.value.addressable_shards]
        shards[-1] = shards[-1] * 1.001
        weight._value = jax.make_array_from_single_device_arrays(weight.shape, weight.value.sharding, shards)


if __name__ == "__main__":
    os.environ["KERASDP_TEST_MODE"] = sys.argv[3]
    backend, count, _, workdir = sys.argv[1:]
    sys.argv[1:] = [f"--backend={backend}", f"--gpus={count}", "--device=cpu", f"--workdir={workdir}"]
    if backend == "torch":  # a run that is so long would be compiled, for as long as all else here takes
        sys.argv.append("--compile=off")
    kerasdp.main(train)
