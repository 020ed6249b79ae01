"""Trains an embedding, whose tokens repeat within a batch, with many optimizers; prints losses and weights.

python optimizers.py BACKEND FIELDS [OPTIMIZER ...]: FIELDS of kerasdp.Config, as JSON
"""

import json
import sys

import numpy as np
from starting import printed

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
OTHERS = {"Adam in an own step": {}, "LossScaleOptimizer": {}, "Counting": {}}


def train(runner):
    import keras
    from learn_classes import StepLosses

    numbers = np.random.RandomState(0)
    # Some tokens are in nearly each sample, as in text, some in one alone, some in none.
    x, y = (numbers.rand(33, 6) ** 3 * 30).astype("int32"), numbers.randint(0, 3, 33)

    class Counting(keras.optimizers.SGD):
        """A user-defined one, whose method TensorFlow calls."""

        calls = 0

        def apply_gradients(self, grads_and_vars):
            Counting.calls += 1
            return super().apply_gradients(grads_and_vars)

    def made(name):
        kind, settings = getattr(keras.optimizers, name.split()[0], Counting), settings_of[name]
        if kind is keras.optimizers.LossScaleOptimizer:
            return kind(keras.optimizers.Adam(0.02), initial_scale=64.0, dynamic_growth_steps=2)
        rate = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.8)
        return kind(rate, **({"exclude_embeddings": False} if name == "Muon" else {}), **settings)

    class OwnStep(keras.Sequential):
        def train_step(self, *data):
            return super().train_step(*data)

    def result(name):
        keras.utils.set_random_seed(3)
        with runner.scope():
            layers = keras.layers
            model = (OwnStep if "own step" in name else keras.Sequential)(
                [
                    keras.Input((6,), dtype="int32"),
                    layers.Embedding(30, 4),
                    layers.Dense(5, "tanh", trainable=False),
                    layers.Flatten(),
                    layers.Dense(8, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.5)),
                    layers.Dense(3),
                ]
            )
            optimizer = made(name)
            if settings_of[name].get("weight_decay"):
                optimizer.exclude_from_weight_decay(var_names=["bias"])
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses = StepLosses(runner)
        runner.fit(model, x, y, epochs=2, callbacks=[losses])
        weights = [weight.tolist() for weight in model.get_weights()]
        return {"losses": losses.values, "weights": weights, "calls": Counting.calls}

    settings_of = OPTIMIZERS | OTHERS
    names = sys.argv[3:] or settings_of
    # Stages and `accumulate` refuse a train_step of the model's own.
    is_plain = runner.config.strategy == "data" and runner.config.accumulate == 1
    return {name: result(name) for name in names if is_plain or "own step" not in name}


if __name__ == "__main__":
    printed(train, sys.argv[1], **{"batch_size": 11} | json.loads(sys.argv[2]))
