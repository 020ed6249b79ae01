"""Trains with many optimizers, in a graph and eagerly, and prints how far the weights part.

python optimizers.py BACKEND NUM_DEVICES [OPTIMIZER ...]
"""

import functools
import json
import sys

import numpy as np

import kerasdp

OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGD clipnorm": {"clipnorm": 0.05},
    "SGD global_clipnorm": {"momentum": 0.9, "global_clipnorm": 0.05},
    "SGD clipvalue": {"clipvalue": 0.004, "weight_decay": 0.01},
    "SGD ema": {"use_ema": True, "ema_momentum": 0.5},
    "SGD ema now and then": {"use_ema": True, "ema_overwrite_frequency": 2},
    "SGD accumulating": {"gradient_accumulation_steps": 2},
    "SGD scaling": {"loss_scale_factor": 8.0},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1, "clipnorm": 0.02},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "Adafactor": {},
    "Nadam": {},
    "Ftrl": {},
    "Lion": {},
    "Lamb": {},
    "Muon": {},
}


def train(runner, names):
    import keras

    numbers = np.random.RandomState(0)
    x, y = numbers.rand(24, 6).astype("float32"), numbers.rand(24, 3).astype("float32")

    def weights(name, settings, *, run_eagerly):
        with runner.scope():
            layers = keras.layers
            # No bias ahead of the batch norm: its gradient would be round-off alone.
            model = keras.Sequential(
                [keras.Input((6,)), layers.Dense(5, use_bias=False), layers.BatchNormalization(), layers.Dense(3)]
            )
            model.layers[0].kernel.constraint = keras.constraints.MaxNorm(0.5)
            rate = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
            optimizer = getattr(keras.optimizers, name.split()[0])(rate, **settings)
            model.compile(optimizer, "mse", run_eagerly=run_eagerly)
        runner.fit(model, x, y, epochs=1)
        return model.get_weights()

    class Counting(keras.optimizers.SGD):
        calls = 0

        def apply_gradients(self, grads_and_vars):
            Counting.calls += 1
            return super().apply_gradients(grads_and_vars)

    keras.optimizers.Counting = Counting
    weights("Counting", {}, run_eagerly=True)
    found = {"calls": Counting.calls}
    for name in names or OPTIMIZERS:
        settings = OPTIMIZERS[name]
        pairs = zip(*(weights(name, settings, run_eagerly=is_eager) for is_eager in (False, True)), strict=True)
        found[name] = max(float(np.abs(ours - theirs).max()) for ours, theirs in pairs)
    return found


def main():
    backend, count, *names = sys.argv[1:]
    run = functools.partial(train, names=names)
    result = kerasdp.launch(run, backend=backend, device="cpu", num_devices=int(count), batch_size=8, verbose=0)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
