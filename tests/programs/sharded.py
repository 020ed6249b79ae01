"""Trains models of which each device holds a part, in float64.

python sharded.py BACKEND NUM_DEVICES SHARD CASE...: `conv`, `tied` (a subclassed model whose layers are shared,
    and whose table is its last kernel, too), `attention`, `lstm`, `own` (a custom loop), and those of `OTHERS`;
    or `resume FOLDER EPOCHS`

Prints, by case: losses, whether the devices agree, and the bytes of weights and slots that a device holds, and in all.
"""

import contextlib
import functools
import gc
import sys

import numpy as np
from starting import printed

import kerasdp

ROWS, BATCH, EPOCHS = 61, 16, 5  # 20 steps; the last batch of an epoch has 13 rows, which no two devices share evenly


def model_of(case):
    import keras
    from keras import layers, ops

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.hidden = layers.Embedding(64, 48), layers.Dense(48, "gelu")
            self.norm = layers.LayerNormalization()

        def call(self, tokens):
            x = self.table(tokens)
            for _ in range(2):
                x = self.norm(x + self.hidden(x))
            return ops.matmul(ops.mean(x, axis=1), ops.transpose(self.table.embeddings))

    def block(x, width, **choices):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4, dropout=0.1)(normed, normed, **choices)
        return x + layers.Dense(width)(layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x)))

    if case == "tied":
        model = Tied()
        model(np.zeros((1, 12), "int32"))
        return model
    if case == "conv":
        return keras.Sequential(
            [keras.Input((8, 8, 3)), layers.Conv2D(64, 3), layers.BatchNormalization(), layers.ReLU(),
             layers.Conv2D(128, 3), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.2), layers.Flatten(),
             layers.Dense(10)]
        )  # fmt: skip
    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(64, 48)(tokens)
    if case == "lstm":
        return keras.Model(tokens, layers.Dense(10)(layers.LSTM(64)(x)))
    x = block(x, 48, use_causal_mask=True)
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def compiled(runner, case, model_of):
    """The model of a case, its loss, and data."""
    import keras

    numbers = np.random.RandomState(0)
    x = numbers.rand(ROWS, 8, 8, 3) if case == "conv" else numbers.randint(0, 64, (ROWS, 12))
    y = numbers.randint(0, 10, ROWS)
    with runner.scope():
        model = model_of("tied" if case in ("own", "resume") else case)
        # All gradients at once, and their weights, as well as each number for itself.
        optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0, weight_decay=0.01)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    return model, loss, x, y


def train(runner, cases, epochs):
    return {case: outcome(runner, case, epochs) for case in cases}


def outcome(runner, case, epochs):
    import keras

    if case in OTHERS:
        return {"losses": OTHERS[case](runner)}
    before = living_bytes()  # of the models of other cases
    model, loss, x, y = compiled(runner, case, model_of)
    others = {}
    if case == "own":
        losses = looped(runner, model, loss, x, y, epochs)
        held = held_bytes(model)
    else:
        seen = []
        living = []

        def note(batch, logs):
            seen.append(held_bytes(model))
            if batch == 1:
                living.append(living_bytes() - before)

        look = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        with noting_while_saved(living) if case == "resume" else contextlib.nullcontext():
            found = runner.fit(
                model, x, y, batch_size=BATCH, epochs=epochs, validation_data=(x[:20], y[:20]), verbose=0,
                callbacks=[] if case == "resume" else [look],
            )  # fmt: skip
        losses, held = found.history["loss"] + found.history["val_loss"], max(seen, default=None)
        others["living"] = max(living, default=None)
    groups = model.weights, model.optimizer.variables
    return {
        "losses": losses,
        "diverged": runner.strategy.diverged_variables(model),
        "held": held,
        "total": [sum(keras.ops.convert_to_numpy(one).nbytes for one in group) for group in groups],
        "description": runner.state.description,
        **others,
    }


def looped(runner, model, loss_of, x, y, epochs):
    """A custom loop."""
    weights = model.trainable_variables
    model.optimizer.build(weights)

    @runner.step
    def step(batch):
        loss, gradients = kerasdp.value_and_grad(lambda: loss_of(batch[1], model(batch[0], training=True)), weights)()
        model.optimizer.apply(gradients, weights)
        return loss

    return [float(step(batch)) for batch in runner.batches(x, y, batch_size=BATCH, epochs=epochs)]


def held_bytes(model):
    """What a device holds of the weights, and of the optimizer's variables."""
    import keras

    from kerasdp.keras_compat.layers import raw_value

    def of_one(variable):
        value = raw_value(variable)
        if hasattr(value, "addressable_shards"):  # jax
            return value.addressable_shards[0].data.nbytes
        return value.nbytes if hasattr(value, "requires_grad") else keras.ops.convert_to_numpy(variable).nbytes

    return [sum(map(of_one, group)) for group in (model.weights, model.optimizer.variables)]


def living_bytes(kind="Parameter"):
    """What all parameters, or tensors, of torch in this process hold."""
    import keras

    gc.collect()
    if keras.backend.backend() == "torch":
        import torch

        kind = getattr(torch.nn, kind, torch.Tensor)
        tensors = [
            each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)
        ]  # of all else a slow check
        storages = [each.untyped_storage() for each in tensors if isinstance(each, kind)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return 0


def noting_while_saved(living):
    """Notes what all tensors hold whenever a checkpoint takes the value of a variable."""
    from kerasdp.checkpoint import state
    from kerasdp.keras_compat.patches import wrapped

    def noted(take, value):
        living.append(living_bytes("Tensor"))
        return take(value)

    return wrapped(state, to_numpy=noted)


def by_many_optimizers(runner):
    import keras

    x, y = np.random.RandomState(0).rand(2, ROWS, 32)
    clipped = {"global_clipnorm": 0.05}
    losses = []
    for make in (
        lambda: keras.optimizers.AdamW(1e-2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.02),
        lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2, **clipped),
        lambda: keras.optimizers.Adamax(1e-2, **clipped),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(1e-2), initial_scale=4.0),
        lambda: keras.optimizers.RMSprop(1e-2, clipvalue=1e-4),
    ):
        with runner.scope():
            model = keras.Sequential(
                [keras.Input((32,)), keras.layers.Dense(96, "tanh", kernel_regularizer="l2"), keras.layers.Dense(32)]
            )
            model.compile(make(), "mse")
        # Which evaluates with the averages of the weights.
        callbacks = [keras.callbacks.SwapEMAWeights()] if model.optimizer.use_ema else []
        found = runner.fit(
            model, x, y, batch_size=BATCH, epochs=2, validation_data=(x[:20], y[:20]), callbacks=callbacks, verbose=0
        )
        losses += found.history["loss"] + found.history["val_loss"]
        losses.append(runner.evaluate(model, x, y))
    return losses


def frozen_and_changed(runner):
    """A frozen layer that is trained later, and a callback that reads and changes the whole model between epochs."""
    import keras

    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])

    x, y = np.random.RandomState(0).rand(2, ROWS, 32)
    with runner.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(96), keras.layers.BatchNormalization(),
                                  keras.layers.Dense(96, "tanh"), keras.layers.Dense(32)])  # fmt: skip
        model.layers[0].trainable = False
        model.compile("adam", "mse")
    best = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    losses = runner.fit(model, x, y, batch_size=BATCH, epochs=2, callbacks=[Halves(), best]).history["loss"]
    model.layers[0].trainable = True
    with runner.scope():
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    losses += runner.fit(model, x, y, batch_size=BATCH, epochs=2).history["loss"]
    outputs = runner.predict(model, x, batch_size=BATCH)
    return [*losses, float(outputs.std()), runner.evaluate(model, x, y), *(float(w.sum()) for w in model.get_weights())]


OTHERS = {"optimizers": by_many_optimizers, "frozen": frozen_and_changed}


if __name__ == "__main__":
    backend, num_devices, shard, *cases = sys.argv[1:]
    shard, *others = shard.split("+")
    settings = ({} if shard == "none" else {"shard": shard}) | dict(each.split("=") for each in others)
    epochs = EPOCHS
    if cases[0] == "resume":
        _, folder, epochs = cases
        cases, settings = ["resume"], settings | {"workdir": folder, "resume": True, "checkpoint_every": 3}
    settings |= {"precision": "float64"}
    printed(functools.partial(train, cases=cases, epochs=int(epochs)), backend, num_devices, **settings)
