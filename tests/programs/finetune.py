"""Fine-tunes a model with adapters, in float64, with dropout, a frozen batch norm and an uneven last batch.

    python finetune.py BACKEND NUM_DEVICES CASE...

A case is one of `CASES`, or JSON: settings of the run, and `epochs`, `also_train`, `optimizer`, `shift` of a frozen
weight. The adapters are those of recipes/finetune.py. Prints, by case: losses of 5 steps an epoch, sums of the
variables, those in which devices differ, how many numbers train, bytes of the newest checkpoint; or what was refused.
"""

import functools
import json
import os
import pathlib
import sys

import numpy as np

import kerasdp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "recipes"))

from finetune import add_adapters

ROWS, BATCH = 75, 16  # the last batch of 11 rows
CASES = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "remat": {"remat": "*attention*"},
    "together": {"shard": "weights", "remat": "*attention*"},
}


def build():
    import keras
    from keras import layers

    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(64, 32, name="words")(tokens)
    x = layers.add([x, layers.MultiHeadAttention(2, 16, dropout=0.1, name="attention")(x, x)])
    x = layers.BatchNormalization(name="norm")(layers.Dropout(0.2)(layers.Dense(64, "gelu", name="hidden")(x)))
    return keras.Model(tokens, layers.Dense(10, name="head")(layers.GlobalAveragePooling1D()(x)))


def numbers_of(variables):
    import keras

    return [np.array(keras.ops.convert_to_numpy(one)) for one in variables]


def train(runner, epochs, also_train, optimizer, shift):
    import keras
    from learn_classes import fitted

    from kerasdp.keras_compat.layers import frozen_weights

    numbers = np.random.RandomState(0)
    x, y = numbers.randint(0, 64, (ROWS, 12)), numbers.randint(0, 10, ROWS)
    with runner.scope():
        model = build()
    model.get_layer("hidden").bias.assign_add(np.full(64, shift))
    add_adapters(model, 4)
    for weight in model.get_layer(also_train).weights:
        weight.trainable = True
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, optimizer)(1e-2, global_clipnorm=1.0), loss)
    held = numbers_of(frozen_weights(model))
    data = {"validation_data": (x[:20], y[:20]), "verbose": 0}
    losses, history = fitted(runner, model, x, y, batch_size=BATCH, epochs=epochs, **data)
    assert {one.dtype for one in frozen_weights(model)} == {"float64"}
    assert all(map(np.array_equal, numbers_of(frozen_weights(model)), held)) and len(held) == 13
    return {
        "losses": losses + history["val_loss"],
        "variables": [float(np.abs(one).sum()) for one in numbers_of(model.variables)],
        "diverged": runner.strategy.diverged_variables(model),
        "train": sum(int(np.prod(one.shape)) for one in model.trainable_variables),
    }


def outcome(backend, num_devices, **settings):
    own = {"epochs": 4, "also_train": "head", "optimizer": "AdamW", "shift": 0.0}
    function = functools.partial(train, **{name: settings.pop(name, value) for name, value in own.items()})
    settings |= {"precision": "float64", "device": "cpu", "verbose": 0}
    try:
        found = kerasdp.launch(function, backend=backend, num_devices=num_devices, **settings)
    except kerasdp.UserError as error:
        return str(error)
    if "workdir" in settings:
        newest = max(os.scandir(os.path.join(settings["workdir"], "checkpoints")), key=lambda file: file.name)
        found["bytes"] = newest.stat().st_size
    return found


if __name__ == "__main__":
    backend, num_devices, *cases = sys.argv[1:]
    known = {case: CASES.get(case) or json.loads(case if case.startswith("{") else "{}") for case in cases}
    print("RESULT " + json.dumps({case: outcome(backend, int(num_devices), **known[case]) for case in cases}))
