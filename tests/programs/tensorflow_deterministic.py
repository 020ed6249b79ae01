"""Trains on TensorFlow as `--deterministic` does on GPUs, on virtual CPU devices, and prints what came out.

python tensorflow_deterministic.py losses MODEL NUM_DEVICES   # 40 steps without and with it, in float64
python tensorflow_deterministic.py runs                       # three steps
python tensorflow_deterministic.py collectives                # what is sent between devices
"""

import functools
import json
import sys

import numpy as np
import tensorflow as tf

import kerasdp
from kerasdp.backends.tensorflow import collectives, xla


def as_on_gpus() -> None:
    """Does what the kit does for `deterministic=True` where there are GPUs."""
    tf.config.experimental.enable_op_determinism()
    xla.has_gpus = lambda: True


def train(name, num_steps, runner):
    """Trains so many steps."""
    import keras
    from learn_classes import fitted

    rows = num_steps * runner.config.batch_size
    x, y = np.random.RandomState(0).randint(0, 256, (rows, 28, 28, 1)).astype("uint8"), np.arange(rows) % 10
    with runner.scope():
        model = kerasdp.build_model(name, (28, 28, 1), 10)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.03, momentum=0.9), loss, metrics=["accuracy"])
    return fitted(runner, model, x, y)[0]


def run(name, num_steps, **settings):
    """Returns the losses."""
    config = {"backend": "tensorflow", "device": "cpu", "num_devices": 2, "batch_size": 12, "verbose": 0} | settings
    return kerasdp.launch(functools.partial(train, name, num_steps), kerasdp.Config(**config))


def main():
    kind, *choices = sys.argv[1:]
    if kind == "losses":
        settings = {"num_devices": int(choices[1]), "precision": "float64"}
        found = {"usual": run(choices[0], 40, **settings)}
        as_on_gpus()
        found["deterministic"] = run(choices[0], 40, **settings)
    elif kind == "runs":
        as_on_gpus()
        found = {"losses": run("convnet", 3)}
    else:
        sent = ("bfloat16", "uint8", "bool", "float16", "int64", "float64")
        found = {"sent": {name: collectives.sendable(tf.zeros(2, name)).dtype.name for name in sent}}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
