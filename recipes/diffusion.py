"""Trains a small diffusion model on digits with a custom loop.

    python recipes/diffusion.py                                          # the first backend installed
    python recipes/diffusion.py --backend=jax --gpus=2 --workdir=runs/diffusion
    python recipes/diffusion.py --backend=torch --workdir=runs/diffusion --resume

Expected of the first command: 440 steps in a few minutes on two CPU cores. The mean error of the predicted noise falls
from 0.8 to below 0.15. It is the same on all backends and numbers of devices. generated.png in the workdir shows digits
that are generated from noise, in 20 steps of DDIM.

A small U-Net predicts the noise in images. Its moving average generates the digits. The step is one function, written
with Keras layers, `keras.ops` and `kerasdp.value_and_grad`. Copy this file into your project and edit it.
"""

import os

from absl import app, flags

import kerasdp

SAMPLING_STEPS = 20
FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 64, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("epochs", 20, "Passes over the training data.", lower_bound=1)
flags.DEFINE_string("dataset", "digits", "digits, fashion_mnist, mnist, cifar10, ...")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def build(image_shape: tuple[int, int, int]):
    """Builds a U-Net that predicts the noise in images. Its inputs are noisy images and their times."""
    import keras
    from keras import layers

    def block(x, width):
        residual = layers.Conv2D(width, 1)(x)
        x = layers.Conv2D(width, 3, padding="same", activation="swish")(layers.GroupNormalization(8)(residual))
        return layers.add([residual, layers.Conv2D(width, 3, padding="same")(x)])

    images, time = keras.Input(image_shape), keras.Input((1,))
    embedding = layers.Dense(32, "swish")(layers.Dense(32, "swish")(time))
    embedding = layers.UpSampling2D(image_shape[:2])(layers.Reshape((1, 1, 32))(embedding))
    first = block(layers.concatenate([layers.Conv2D(32, 3, padding="same")(images), embedding]), 32)
    second = block(layers.AveragePooling2D(2)(first), 48)
    x = block(layers.AveragePooling2D(2)(second), 64)
    x = block(layers.concatenate([layers.UpSampling2D(2)(x), second]), 48)
    x = block(layers.concatenate([layers.UpSampling2D(2)(x), first]), 32)
    return keras.Model([images, time], layers.Conv2D(image_shape[2], 1, kernel_initializer="zeros")(x))


def train(runner):
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""
    import keras
    import numpy as np
    from keras import ops

    config = runner.config
    data = kerasdp.load_data(FLAGS.dataset)
    with runner.scope():
        network, ema_network = build(data.input_shape), build(data.input_shape)
        optimizer = keras.optimizers.AdamW(2e-3, weight_decay=1e-4)
        seeds, error = keras.random.SeedGenerator(config.seed), keras.metrics.Mean(name="error")
    ema_network.set_weights(network.get_weights())
    optimizer.build(network.trainable_variables)

    def rates(time):
        """Returns the rates of signal and noise for times from 0 to 1, shape (rows, 1). Their squares add up to 1."""
        angle = np.arccos(0.999) + time * (np.arccos(0.02) - np.arccos(0.999))
        return ops.cos(angle), ops.sin(angle)

    def add_noise(images, noise, time):
        signal_rate, noise_rate = (rate[:, :, None, None] for rate in rates(time))
        return signal_rate * images + noise_rate * noise

    @runner.step
    def train_step(batch):
        images = ops.cast(batch[0], keras.config.floatx()) / 127.5 - 1
        noise = keras.random.normal(ops.shape(images), seed=seeds)
        time = keras.random.uniform((ops.shape(images)[0], 1), seed=seeds)

        def noise_error():
            return ops.mean(ops.abs(noise - network([add_noise(images, noise, time), time], training=True)))

        loss, gradients = kerasdp.value_and_grad(noise_error, network.trainable_variables)()
        optimizer.apply(gradients, network.trainable_variables)
        for weight, ema in zip(network.weights, ema_network.weights, strict=True):
            ema.assign(0.98 * ema + 0.02 * weight)
        error.update_state(loss)
        return {"loss": loss, "error": error.result()}

    runner.checkpoint(models=[network, ema_network], optimizers=optimizer, metrics=error, variables=seeds)
    for batch in runner.batches(data.train, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs):
        if batch.number == 0:
            error.reset_state()
        runner.log(train_step(batch))

    @runner.step(returns="rows")
    def denoise(batch):
        """Removes noise from images, with one DDIM step from a time to an earlier time."""
        noisy, time, earlier = batch["noisy"], batch["time"], batch["earlier"]
        noise = ema_network([noisy, time], training=False)
        signal_rate, noise_rate = (rate[:, :, None, None] for rate in rates(time))
        return add_noise((noisy - noise_rate * noise) / signal_rate, noise, earlier)

    images = np.random.RandomState(config.seed).normal(size=(32, *data.input_shape)).astype(keras.config.floatx())
    times = np.linspace(1, 0, SAMPLING_STEPS + 1, dtype=keras.config.floatx())
    for time, earlier in zip(times[:-1], times[1:], strict=True):
        time, earlier = np.full((32, 1), time), np.full((32, 1), earlier)
        images = ops.convert_to_numpy(denoise({"noisy": images, "time": time, "earlier": earlier}))
    if runner.is_chief and config.workdir is not None:
        height, width, channels = data.input_shape
        rows = np.clip(images, -1, 1).reshape(4, 8, height, width, channels).transpose(0, 2, 1, 3, 4)
        path = os.path.join(config.workdir, "generated.png")
        keras.utils.save_img(path, rows.reshape(4 * height, 8 * width, channels))
        print(f"generated digits: {path}")
    return float(error.result())


def main(argv):
    """Starts the training with the flags."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
