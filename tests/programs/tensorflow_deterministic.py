"""Trains on TensorFlow as `--deterministic` does on GPUs, on virtual CPU devices, and prints what came out.

python tensorflow_deterministic.py losses MODEL NUM_DEVICES   # 40 steps without and with it, in float64
python tensorflow_deterministic.py runs                       # three steps
python tensorflow_deterministic.py refused                    # models that are refused
python tensorflow_deterministic.py collectives                # what is sent between devices
"""

import functools
import json
import sys

import numpy as np
import tensorflow as tf

import kerasdp
from kerasdp.backends.tensorflow import collectives, data_parallel, xla
from kerasdp.backends.tensorflow.devices import make_deterministic


def as_on_gpus() -> None:
    """Does what the kit does for `deterministic=True` where there are GPUs."""
    make_deterministic()
    xla.has_gpus = lambda: True
    make = data_parallel.DataParallel.__init__

    def init(strategy, devices, config):
        make(strategy, devices, config)
        strategy.must_be_deterministic = True

    data_parallel.DataParallel.__init__ = init


def resized(keras):
    """Has a gradient without a deterministic kernel."""
    layers, inputs = keras.layers, keras.Input((28, 28, 1))
    x = layers.Conv2D(2, 3)(inputs)
    x = layers.Lambda(lambda images: tf.image.resize(images, (9, 9), "nearest"))(x)
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


def pooled(keras):
    """Has one without where XLA compiles it."""
    layers, inputs = keras.layers, keras.Input((28, 28, 1))
    pool = tf.function(lambda images: tf.nn.max_pool(images, 2, 2, "VALID"), jit_compile=True)
    x = layers.Lambda(pool)(layers.Conv2D(2, 3)(inputs))
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


def train(build, num_steps, runner):
    """Trains so many steps; `build`: a model, None for that of the run."""
    import keras
    from learn_classes import fitted

    rows = num_steps * runner.config.batch_size
    x, y = np.random.RandomState(0).randint(0, 256, (rows, 28, 28, 1)).astype("uint8"), np.arange(rows) % 10
    with runner.scope():
        model = kerasdp.build_model(runner.config, (28, 28, 1), 10) if build is None else build(keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.03, momentum=0.9), loss, metrics=["accuracy"])
    return fitted(runner, model, x, y)[0]


def run(build, num_steps, **settings):
    """Returns the losses, or the error."""
    config = {"backend": "tensorflow", "device": "cpu", "num_devices": 2, "batch_size": 12, "verbose": 0} | settings
    try:
        return kerasdp.launch(functools.partial(train, build, num_steps), **config)
    except kerasdp.UserError as error:
        return str(error)


def main():
    kind, *choices = sys.argv[1:]
    if kind == "losses":
        settings = {"model": choices[0], "num_devices": int(choices[1]), "precision": "float64"}
        found = {"usual": run(None, 40, **settings)}
        as_on_gpus()
        found["deterministic"] = run(None, 40, **settings)
    elif kind == "runs":
        as_on_gpus()
        found = {"losses": run(None, 3, model="convnet")}
    elif kind == "refused":
        as_on_gpus()
        found = {"kernel": run(resized, 1, check="off"), "compiled": run(pooled, 1, num_devices=1)}
    else:
        sent = ("bfloat16", "uint8", "bool", "float16", "int64", "float64")
        found = {"sent": {name: collectives.sendable(tf.zeros(2, name)).dtype.name for name in sent}}
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
