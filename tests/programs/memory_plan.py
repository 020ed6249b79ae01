"""Trains a small model, and prints what was counted for it, or how much memory it took: python memory_plan.py JSON.

JSON: `model` (gpt, or a built-in one), `rows` of a batch, `blocks`, `steps`, what to `print` (losses, count,
each, peak), and
the settings of the run.
"""

import dataclasses
import functools
import json
import resource
import sys

import numpy as np

import kerasdp

LENGTH, WIDTH, TOKENS = 64, 128, 512


def gpt(blocks):
    import keras
    from keras import layers

    class Block(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
            self.attention = layers.MultiHeadAttention(4, WIDTH // 4)
            self.up, self.down = layers.Dense(4 * WIDTH, activation="gelu"), layers.Dense(WIDTH)

        def call(self, x):
            attended = self.norms[0](x)
            x = x + self.attention(attended, attended, use_causal_mask=True)
            return x + self.down(self.up(self.norms[1](x)))

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH)(inputs)
    for _ in range(blocks):
        x = Block()(x)
    return keras.Model(inputs, layers.Dense(TOKENS, name="logits")(layers.LayerNormalization()(x)), name="gpt")


def case(name, blocks, samples):
    random = np.random.RandomState(0)
    if name == "gpt":
        x, y = (random.randint(0, TOKENS, (samples, LENGTH)).astype("int32") for _ in range(2))
        return gpt(blocks), x, y
    from kerasdp.models import classifiers

    x, y = random.randint(0, 255, (samples, 28, 28, 1)).astype("uint8"), random.randint(0, 10, samples)
    return getattr(classifiers, name)((28, 28, 1), 10), x, y.astype("int32")


def temporary_bytes(model, x, y):
    """What XLA's program of a step holds besides weights, slots and gradients."""
    import jax
    import keras

    state = [[each.value for each in list_] for list_ in (model.trainable_variables, model.non_trainable_variables)]
    metrics = [each.value for each in model.metrics_variables]

    slots = [each.value for each in model.optimizer.variables]

    def loss(weights):
        return model.compute_loss_and_updates(
            weights, state[1], metrics, x, y, None, training=True, optimizer_variables=slots
        )[0]

    def step(weights, slots):
        value, gradients = jax.value_and_grad(loss)(weights)
        return value, *model.optimizer.stateless_apply(slots, gradients, weights)

    found = jax.jit(step, donate_argnums=(0, 1)).lower(state[0], slots).compile().memory_analysis()
    return found.temp_size_in_bytes - sum(keras.ops.size(each) * 4 for each in state[0])


def train(runner, model, rows, blocks, steps, what):
    import keras

    from kerasdp.training.memory_plan import count_activations, count_each
    from kerasdp.training.readers import make_reader

    net, x, y = case(model, blocks, rows * steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.SGD(0.03, momentum=0.9), loss)
    losses = runner.fit(net, x, y, batch_size=rows, verbose=0 if what != "losses" else "auto").history["loss"]
    if what == "losses":
        return losses
    if what == "peak":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    reader = make_reader(runner.config, runner.strategy, runner.devices, x, y, None, rows, training=True)
    before = [keras.ops.convert_to_numpy(each) for each in net.variables]
    if what == "each":
        given = dataclasses.replace(runner.config, fit_into="1GB")
        ladder = count_each(net, reader, runner.strategy, given)
        by_names = {names: count_activations(net, reader, runner.strategy, names) for names in ladder}
        return {
            names: [sum(each.by_layer(rows).values()) for each in (ladder[names], by_names[names])] for names in ladder
        }
    counted = sum(count_activations(net, reader, runner.strategy, runner.config.remat).by_layer(rows).values())
    assert all((old == keras.ops.convert_to_numpy(each)).all() for old, each in zip(before, net.variables, strict=True))
    return counted, temporary_bytes(net, x[:rows], y[:rows]) if runner.config.backend == "jax" else None


if __name__ == "__main__":
    asked = {"blocks": 8, "steps": 2} | json.loads(sys.argv[1])
    job = functools.partial(
        train, what=asked.pop("print"), **{name: asked.pop(name) for name in ("model", "rows", "blocks", "steps")}
    )
    found = kerasdp.launch(job, **{"num_devices": 1, "device": "cpu", "verbose": 0} | asked)
    print("RESULT " + json.dumps(found))
