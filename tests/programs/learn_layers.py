"""Layers that depend on the whole batch or draw random numbers, as cases of `learn.py`."""

import dataclasses

import numpy as np

import kerasdp


def batch_norm(runner):
    """Batch norm over the global batch, and over each replica's shard."""
    import keras
    from keras import layers
    from learn_classes import fitted

    random = np.random.RandomState(3)
    x, y = random.randint(0, 255, (45, 8, 8, 3)).astype("uint8"), random.randint(0, 5, 45)

    def one(statistics):
        with runner.scope():
            first = [layers.Rescaling(1 / 255), layers.Conv2D(6, 3), layers.BatchNormalization()]
            second = [layers.Activation("tanh"), layers.Conv2D(6, 3, strides=2), layers.BatchNormalization(scale=False)]
            last = [layers.Flatten(), layers.Dense(5)]
            model = keras.Sequential([keras.Input((8, 8, 3)), *first, *second, *last])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
        kept = runner.config
        runner.config = dataclasses.replace(kept, batch_norm=statistics)
        losses, history = fitted(runner, model, x, y, batch_size=14, epochs=3, validation_data=(x, y))
        runner.config = kept
        moving = [np.asarray(v).sum().item() for v in model.non_trainable_variables]
        return {"losses": losses, "val_loss": history["val_loss"], "moving": moving}

    return {statistics: one(statistics) for statistics in ("sync", "replica")}


def round_off(runner):
    """The largest relative error of the variance of many numbers by batch norm."""
    import keras

    random = np.random.RandomState(3)
    many = random.rand(61, 28, 28, 3).astype("float32") * (random.rand(61, 28, 28, 1) > 0.6)
    layer = kerasdp.layers.BatchNormalization(momentum=0.0)
    layer(many, training=True)
    variance = keras.ops.convert_to_numpy(layer.moving_variance)
    return np.abs(variance / many.astype("float64").var((0, 1, 2)) - 1).max().item()


def float8(runner):
    """Layers that keep how large their inputs and gradients were: all of a batch, of which some rows are far larger.

    Layers in float64, since float8 turns round-off into other numbers where it rounds up or down.
    """
    import keras
    from keras import layers

    random = np.random.RandomState(6)
    x, y = random.randn(22, 5, 4), random.randn(22, 5, 1)
    x[::3] *= 6

    def learned(optimizer):
        keras.config.set_dtype_policy("float64")
        with runner.scope():
            model = keras.Sequential([layers.EinsumDense("abc,cd->abd", (5, 3), activation="tanh"), layers.Dense(1)])
            model.build((None, 5, 4))
            model.quantize("float8")
            model.compile(optimizer, "mse")
        keras.config.set_dtype_policy("float32")
        losses = runner.fit(model, x, y, batch_size=8, epochs=4, verbose=0).history["loss"]
        largest = [float(keras.ops.max(each)) for each in model.trainable_weights if each.overwrite_with_gradient]
        return {"losses": losses, "largest": largest}

    accumulating = keras.optimizers.SGD(0.02, gradient_accumulation_steps=2)
    return [learned(keras.optimizers.SGD(0.02)), learned(accumulating)]


def random_layers(runner):
    """Dropout of all kinds: its masks, bit for bit."""
    import keras
    from keras import layers
    from learn_classes import LastOutputs

    random = np.random.RandomState(5)
    x = random.rand(45, 6, 6, 4).astype("float32")

    def mask(make_layers):
        with runner.scope():
            inputs = keras.Input((6, 6, 4))
            outputs = layers.PReLU()(keras.ops.ones_like(inputs))  # something to train, which leaves the ones alone
            for layer in make_layers():
                outputs = layer(outputs)
            model = keras.Model(inputs, outputs)
            model.compile("sgd", loss=lambda y, outputs: keras.ops.mean(outputs), metrics=[LastOutputs((3, 6, 6, 4))])
        runner.fit(model, x, x, batch_size=14, epochs=2, verbose=0)
        (last,) = [variable for variable in model.metrics_variables if variable.path.startswith("last")]
        dropped = keras.ops.convert_to_numpy(last) == 0
        return [np.packbits(dropped).tobytes().hex(), float(dropped.mean())]

    return {
        "dropout": mask(lambda: [layers.Dropout(0.3, seed=4), layers.Dropout(0.3)]),
        "one_for_all": mask(lambda: [layers.Dropout(0.5, noise_shape=(1, 6, None, 4))]),
        "one_for_axes": mask(lambda: [layers.Dropout(0.3, noise_shape=(None, 1, 6, 4)), layers.SpatialDropout2D(0.4)]),
    }
