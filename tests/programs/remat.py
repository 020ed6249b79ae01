"""Trains models with and without rematerialization, in float64.

python remat.py BACKEND NUM_DEVICES COMPILE REMAT SHARD CASE...: those of `sharded.py`, and `blocks`; or
    `resume FOLDER EPOCHS`, of `blocks`. COMPILE is for torch, REMAT is `on` or `none`

Prints, by case: losses, sums of the variables, whether the devices agree, and how often a block was called.
"""

import functools
import json
import sys

import numpy as np

import kerasdp
from tests.programs import sharded

BATCH, EPOCHS = sharded.BATCH, sharded.EPOCHS
PATTERNS = {
    "tied": "dense*, layer_normal*",
    "conv": "conv2d*,batch_norm*,dropout*",
    "attention": "multi*,dense*,layer*",
    "lstm": "lstm*",
}


calls = []  # of a block, with `training`


def model_of(case):
    import keras
    from keras import layers, ops

    if case != "blocks":
        return sharded.model_of(case)

    class Block(layers.Layer):
        """With dropout, a batch norm, an added loss, and a mask that goes through."""

        def __init__(self, adds=False):
            super().__init__()
            self.adds = adds
            self.supports_masking = True
            self.norm = layers.LayerNormalization()
            self.attention = layers.MultiHeadAttention(2, 8, dropout=0.1)
            self.up, self.down = layers.Dense(64, "gelu"), layers.Dense(16)
            self.batch_norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.2)

        def call(self, x, training=False):
            calls.append(training)
            x = x + self.attention(self.norm(x), x)
            y = self.down(self.up(self.batch_norm(x)))
            if self.adds:
                self.add_loss(0.01 * ops.mean(ops.square(y)))
            return x + self.drop(y)

    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(64, 16, mask_zero=True)(tokens)
    block = Block()
    x = block(Block(adds=True)(block(x)))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def train(runner, cases, epochs):
    return {case: outcome(runner, case, epochs) for case in cases}


def outcome(runner, case, epochs):
    import keras

    model, loss, x, y = sharded.compiled(runner, case, model_of)
    if case == "own":
        losses = sharded.looped(runner, model, loss, x, y, epochs)
    else:
        found = runner.fit(model, x, y, batch_size=BATCH, epochs=epochs, validation_data=(x[:20], y[:20]), verbose=0)
        losses = found.history["loss"] + found.history["val_loss"]
    total = [float(np.abs(keras.ops.convert_to_numpy(variable)).sum()) for variable in model.variables]
    diverged = runner.strategy.diverged_variables(model)
    return {"losses": losses, "variables": total, "diverged": diverged, "calls": len(calls)}


def pattern_of(case):
    return {"blocks": "blocks", "own": PATTERNS["tied"]}.get(case) or PATTERNS[case]


if __name__ == "__main__":
    backend, num_devices, compiles, remat, shard, *cases = sys.argv[1:]
    epochs, more = EPOCHS, {}
    if cases[0] == "resume":
        _, folder, epochs = cases
        cases, more = ["blocks"], {"workdir": folder, "resume": True}
    if shard != "none":
        more["shard"] = shard
    if backend == "torch":
        more["compile"] = compiles
    result = {}
    for case in cases:
        settings = more | ({"remat": pattern_of(case)} if remat == "on" else {})
        result |= kerasdp.launch(
            functools.partial(train, cases=[case], epochs=int(epochs)), backend=backend, num_devices=int(num_devices),
            device="cpu", precision="float64", verbose=0, **settings,
        )  # fmt: skip
    print("RESULT " + json.dumps(result))
