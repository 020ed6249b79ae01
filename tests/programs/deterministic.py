"""Trains without and with `--deterministic`; prints the losses bit by bit, or the error.

python deterministic.py BACKEND NUM_DEVICES [refused]
"""

import json
import sys

import numpy as np

import kerasdp


def train(runner):
    """Ten steps of a convnet."""
    import keras
    from learn_classes import fitted

    x, y = np.random.RandomState(0).randint(0, 256, (60, 28, 28, 1)).astype("uint8"), np.arange(60) % 10
    with runner.scope():
        model = kerasdp.build_model(runner.config, (28, 28, 1), 10)
        if "refused" in sys.argv:
            model = keras.Sequential([model, keras.layers.Lambda(put)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return [value.hex() for value in fitted(runner, model, x, y, batch_size=12, epochs=2)[0]]


def put(x):
    """Adds nothing, by an operation of torch that has no deterministic algorithm."""
    import torch

    return x + torch.zeros(4).put_(torch.tensor([0, 1]), torch.zeros(2)).sum()


if __name__ == "__main__":
    found = {}
    choices = {"backend": sys.argv[1], "num_devices": int(sys.argv[2]), "device": "cpu", "verbose": 0}
    for deterministic in (False, True):
        try:
            found[str(deterministic)] = kerasdp.launch(train, model="convnet", deterministic=deterministic, **choices)
        except kerasdp.UserError as error:
            found[str(deterministic)] = str(error)
    print("RESULT " + json.dumps(found))
