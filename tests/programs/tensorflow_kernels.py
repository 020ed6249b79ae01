"""Trains, evaluates and predicts on TensorFlow, and prints what a GPU would not do on the device: see `gpu_kernels`.

python tensorflow_kernels.py NUM_DEVICES CASE ...

Runs on virtual CPU devices, with the code paths of GPUs: collectives between replicas (`ReductionToOneDevice` is for
virtual devices alone), and replicas on other devices than the host.
"""

import functools
import json
import sys

import gpu_kernels
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import kerasdp
from kerasdp.backends.tensorflow import data_parallel, xla

OWN = ("model", "optimizer", "steps_per_execution", "is_kept")  # of a case; the others are of kerasdp.Config
SGD = "sgd(learning_rate=0.01, momentum=0.9)"
CASES = {
    "adam": {"model": "lenet", "optimizer": "adam(global_clipnorm=1.0)"},
    "convnet": {"model": "convnet"},
    "clipnorm": {"model": "convnet", "optimizer": "adamw(clipnorm=1.0, weight_decay=0.01)"},
    "uneven": {"model": "convnet", "batch_size": 31},
    "uneven-replica": {"model": "convnet", "batch_size": 31, "batch_norm": "replica"},
    "float64": {"model": "convnet", "precision": "float64"},
    "bfloat16": {"model": "convnet", "precision": "bfloat16"},
    "kept-several": {"model": "convnet", "is_kept": True, "steps_per_execution": 3},
    "resnet50": {"model": "resnet50"},
    "accumulate-float16": {"model": "convnet", "accumulate": 4, "precision": "float16"},
    "kept-tokens": {"model": "tokens", "is_kept": True},
}  # fmt: skip


class Watch:
    """Collects the names of the graphs that run while it is on."""

    def __init__(self):
        self.roots, self.is_on = set(), False
        call = context.Context.call_function

        def call_function(eager_context, name, *args, **kwargs):
            if self.is_on:
                self.roots.add(name.decode())
            return call(eager_context, name, *args, **kwargs)

        context.Context.call_function = call_function

    def begin(self, batch=0, logs=None):
        """Watches from now on."""
        self.is_on = True


def as_on_gpus() -> None:
    """Takes the paths that the kit takes on GPUs, on virtual CPU devices: the first one stands for the host."""
    gpu_kernels.keep_graphs()
    make, names = tf.config.set_logical_device_configuration, data_parallel.device_names
    tf.config.set_logical_device_configuration = lambda cpu, parts: make(cpu, [*parts, parts[0]])
    tf.distribute.ReductionToOneDevice = lambda *_: None
    xla.has_gpus = lambda: True

    def device_names(chosen):
        found = names(chosen)
        return [f"CPU:{number + 1}" for number in range(len(found))] if len(found) > 1 else found

    data_parallel.device_names = device_names


def tokens(keras):
    """A net with an embedding, attention and random numbers of each kind.

    Without a recurrent layer: on GPUs Keras (3.15) takes cuDNN's, which is one operation, in place of a loop.
    """
    layers, inputs = keras.layers, keras.Input((12,), dtype="int32")
    x = layers.Embedding(50, 16)(inputs)
    x = layers.SpatialDropout1D(0.2)(layers.GaussianNoise(0.1)(x))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x))
    x = layers.GlobalAveragePooling1D()(layers.GaussianDropout(0.1)(x))
    return keras.Model(inputs, layers.Dense(10)(layers.AlphaDropout(0.1)(x)))


def train(watch, runner, model, optimizer=SGD, steps_per_execution=1, is_kept=False):
    """Two epochs, the second of which is watched, an evaluation and a prediction."""
    import keras

    from kerasdp.training import readers

    readers._stays_on_device = lambda *_: is_kept
    readers._FEW_BYTES = 0  # as on GPUs, where threads read
    numbers, rows, config = np.random.RandomState(0), 6 * runner.config.batch_size, runner.config
    with runner.scope():
        if model == "tokens":
            x, model = numbers.randint(0, 50, (rows, 12)).astype("int32"), tokens(keras)
        else:
            shape = (32, 32, 3) if model == "resnet50" else (28, 28, 1)
            x = numbers.randint(0, 256, (rows, *shape)).astype("uint8")
            model = kerasdp.build_model(model, x.shape[1:], 10)
        model.compile(
            kerasdp.make_optimizer(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
            # What "auto" is on a GPU: Keras (3.15) turns XLA off where there are CPUs only, and with several replicas.
            jit_compile=runner.num_replicas == 1 and config.strategy == "data",
        )
    y = numbers.randint(0, 10, rows)
    turn_on = keras.callbacks.LambdaCallback(on_train_batch_end=watch.begin)
    runner.fit(model, x, y, epochs=2, callbacks=[turn_on])
    runner.evaluate(model, x, y)
    runner.predict(model, x)
    watch.is_on = False


def judge(watch: Watch, case: str, count: int) -> dict:
    """Runs a case and judges its operations."""
    settings = dict(CASES[case])
    watch.roots = set()
    own = {name: settings.pop(name) for name in OWN if name in settings}
    config = kerasdp.Config(
        **{"backend": "tensorflow", "device": "cpu", "num_devices": count, "batch_size": 32, "verbose": 0,
           "check": "off"} | settings
    )  # fmt: skip
    kerasdp.launch(functools.partial(train, watch, **own), config)
    judged = gpu_kernels.Judge("CPU:0" if count > 1 else "")
    for name in sorted(watch.roots):
        judged.root(name)
    return {"num_roots": len(watch.roots), "found": sorted(judged.found), "seen": judged.seen}


def faults() -> dict:
    """Judges small functions that would go through the host, each in its way, and one that would not."""
    images, floats = tf.zeros((4, 5), tf.uint8), tf.ones((4, 5))

    def chosen(x):
        return tf.cond(tf.reduce_all(x > 0), lambda: x * 2, lambda: x * 3)

    cases = {
        "stack": (lambda x: tf.stack([x, x]), images),
        "reshape": (lambda x: tf.reshape(tf.argmax(x, 1, tf.int32)[:, None] * tf.ones((1, 5), tf.int32), [-1]), floats),
        "cond": (chosen, floats),
        "fine": (lambda x: tf.nn.relu(x @ tf.transpose(x)), floats),
    }
    found = {}
    for name, (function, argument) in cases.items():
        judged = gpu_kernels.Judge()
        judged.root(tf.function(function, autograph=False).get_concrete_function(argument).name.decode())
        found[name] = sorted(judged.found)
    return found


def main():
    if not tf.test.is_built_with_cuda():
        print("RESULT", json.dumps(None))
        return
    count, *cases = sys.argv[1:]
    watch = Watch()
    as_on_gpus()
    print("RESULT", json.dumps({case: judge(watch, case, int(count)) for case in cases} | {"faults": faults()}))


if __name__ == "__main__":
    main()
