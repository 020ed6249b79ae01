"""Trains an embedding, whose tokens repeat within a batch, with many optimizers; prints losses and weights.

python embedding_updates.py BACKEND FIELDS [OPTIMIZER ...]: FIELDS of kerasdp.Config, as JSON
"""

import json
import sys

import numpy as np
from optimizers import OPTIMIZERS

import kerasdp

OTHERS = {"Adam in an own step": {}, "LossScaleOptimizer": {}}


def train(runner):
    import keras
    from learn_classes import StepLosses

    numbers = np.random.RandomState(0)
    # Some tokens are in nearly each sample, as in text, some in one alone, some in none.
    x, y = (numbers.rand(33, 6) ** 3 * 30).astype("int32"), numbers.randint(0, 3, 33)

    def made(name):
        kind, settings = getattr(keras.optimizers, name.split()[0]), settings_of[name]
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
                    layers.Dense(8, "tanh"),
                    layers.Dense(3),
                ]
            )
            optimizer = made(name)
            if settings_of[name].get("weight_decay"):
                optimizer.exclude_from_weight_decay(var_names=["bias"])
            model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses = StepLosses(runner)
        runner.fit(model, x, y, epochs=2, callbacks=[losses])
        return {"losses": losses.values, "weights": [weight.tolist() for weight in model.get_weights()]}

    settings_of = OPTIMIZERS | OTHERS
    names = sys.argv[3:] or settings_of
    # Stages and `accumulate` refuse a train_step of the model's own.
    is_plain = runner.config.strategy == "data" and runner.config.accumulate == 1
    return {name: result(name) for name in names if is_plain or "own step" not in name}


def main():
    backend, fields = sys.argv[1], json.loads(sys.argv[2])
    result = kerasdp.launch(train, **{"backend": backend, "device": "cpu", "batch_size": 11, "verbose": 0} | fields)
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
