"""Trains for two steps on four virtual devices, and lowers each program that jax compiled for other platforms.

python lower_jax.py CASE ...   a case is JSON: {"model": "convnet", "strategy": "data", "precision": "float32",
                               "optimizer": "adam", "platforms": ["cuda", "tpu"], "compile": ["cpu", "cuda", "tpu"]}

Prints for each case its programs: what `lowered.py` reads in the texts of the real steps, as `fit` calls them. They
are compiled for four CPU devices; with the wheels that `targets.py` wants also for four GPUs and four TPUs.
"""

import functools
import json
import sys

import jax
import numpy as np
import targets
from lowered import collectives, facts

import kerasdp
from kerasdp.backends.jax import data_parallel, devices
from kerasdp.config import Config

NUM_DEVICES = 4
BATCH_SIZE = 32


class Recorder:
    """Notes what the kit's jitted functions are called with first; takes the place of `jax.jit`."""

    def __init__(self):
        self.jit, self.calls = jax.jit, {}

    def __call__(self, function=None, **options):
        if function is None:  # a decorator of jax's own
            return functools.partial(self, **options)
        jitted = self.jit(function, **options)
        inner = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        if not str(getattr(inner, "__module__", "")).startswith("kerasdp."):
            return jitted

        @functools.wraps(jitted)
        def call(*arguments):
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
                return jitted(*arguments)  # a part of a program, such as a draw within a step
            key = inner.__qualname__, str(jax.tree.map(np.shape, arguments))
            if key not in self.calls:
                self.calls[key] = jitted, jax.tree.map(described, arguments), options
            return jitted(*arguments)

        return call


def described(leaf):
    """What jax compiles a program for: an array is deleted once it was donated."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
    return leaf


def model_of(name):
    import keras

    if name == "gpt":
        return small_gpt()
    if name == "pooling":  # max pooling, whose gradient scatters, and an embedding's would, too
        return keras.Sequential([
            keras.Input((28, 28, 1)), keras.layers.Rescaling(1 / 255), keras.layers.Conv2D(8, 3),
            keras.layers.MaxPooling2D(3, 2), keras.layers.Flatten(), keras.layers.Dense(12),
        ])  # fmt: skip
    if name == "lstm":  # step by step, as on several GPUs
        rows = [keras.Input((28, 28, 1)), keras.layers.Rescaling(1 / 255), keras.layers.Reshape((28, 28))]
        return keras.Sequential([*rows, keras.layers.LSTM(16), keras.layers.Dense(12)])
    return kerasdp.build_model(name, (28, 28, 1), 12)


def small_gpt():
    """A block of attention over 8 tokens, with layer normalization and dropout."""
    import keras
    from keras import layers

    tokens = keras.Input((8,), dtype="int32")
    x = layers.Embedding(64, 16)(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(4, 4)(*[layers.LayerNormalization()(x)] * 2, use_causal_mask=True)])
    x = layers.Add()([x, layers.Dense(16)(layers.Dense(32, "gelu")(layers.LayerNormalization()(x)))])
    x = layers.Dropout(0.1)(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(64)(x), name="gpt")


def train(runner, case):
    import keras

    with runner.scope():
        model = model_of(case["model"])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = {
            "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9), "adam": lambda: keras.optimizers.Adam(1e-3)
        }[case.get("optimizer", "sgd")]()  # fmt: skip
        model.compile(optimizer, loss, metrics=["accuracy"])
    random = np.random.RandomState(0)
    shape = (2 * BATCH_SIZE, *model.input_shape[1:])
    x = random.randint(0, 64 if len(shape) == 2 else 256, shape).astype("int32" if len(shape) == 2 else "uint8")
    y = random.randint(0, 12, shape[:2] if len(shape) == 2 else shape[:1])
    runner.fit(model, x, y, batch_size=BATCH_SIZE, epochs=1)
    return {
        "activations": [
            BATCH_SIZE * int(np.prod(layer.output.shape[1:])) * 4 for layer in model.layers if layer.weights
        ],
        "gradients": sum(weight.value.nbytes for weight in model.trainable_variables),
        "num_trainable": len(model.trainable_variables),
        "num_non_trainable": len(model.non_trainable_variables),
        "num_slots": len(model.optimizer.variables),
        "num_metrics": len(model.metrics_variables),
    }


def programs_of(case):
    """Trains, and returns the facts of each program."""
    recorder = Recorder()
    jax.jit = recorder
    started = data_parallel.start_jax

    def start_jax(found, config):  # as if the virtual devices were an accelerator's
        of_run = started(found, config)
        devices.set_precision_of_products("gpu", Config(precision="float32"))
        return of_run

    data_parallel.start_jax = start_jax
    settings = {
        "num_devices": NUM_DEVICES, "device": "cpu", "verbose": 0, "check": "off",
        **{name: case[name] for name in (
               "strategy", "precision", "accumulate", "batch_norm", "shard"
           ) if name in case},
    }  # fmt: skip
    try:
        model = kerasdp.launch(lambda runner: train(runner, case), kerasdp.Config(backend="jax", **settings))
    finally:
        jax.jit = recorder.jit
    found = []
    for (name, _), (jitted, arguments, options) in recorder.calls.items():
        traced = jitted.trace(*arguments)
        program = {"name": name.split(".")[-1].strip("_"), "platforms": {}, "compiled": {}}
        for platform in case.get("platforms", ["cuda", "tpu"]):
            program["platforms"][platform] = facts(traced.lower(lowering_platforms=(platform,)))
        for platform in case.get("compile", []):
            if platform == "cpu":
                compiled = traced.lower().compile()
            else:
                compiled = targets.compiled_for(platform, jitted, arguments, options.get("donate_argnums", ()))
            memory = compiled.memory_analysis()
            program["compiled"][platform] = {
                "sent": collectives(compiled.as_text()), "aliased": memory.alias_size_in_bytes,
                "taken": memory.argument_size_in_bytes, "algorithms": targets.algorithms(compiled.as_text()),
            }  # fmt: skip
        found.append(program)
    return {"model": model, "programs": found}


if __name__ == "__main__":
    print("RESULT " + json.dumps([programs_of(json.loads(case)) for case in sys.argv[1:]]))
