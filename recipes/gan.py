"""Trains a GAN, a custom loop: a critic with a gradient penalty, and a generator of digits.

    python recipes/gan.py                                          # the first backend installed
    python recipes/gan.py --backend=jax --gpus=2 --workdir=runs/gan
    python recipes/gan.py --backend=torch --workdir=runs/gan --resume

Expected of the first: 460 steps in a few minutes on two CPU cores, after which the distance that the critic sees
between real and made digits has fallen from above 10 to about 2. With --workdir made.png shows a hundred made ones.
Steps, and so the curve, are the same on all backends and numbers of devices, up to round-off, which a GAN amplifies.

Each step updates the critic three times and the generator once, on all devices. The step is one function, written with
Keras layers, `keras.ops` and `kerasdp.value_and_grad`. Copy this file into your project and change what you like.
"""

import os

from absl import app, flags

import kerasdp

NOISE, CRITIC_UPDATES = 32, 3
FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 64, "Samples per step, over all devices.")
flags.DEFINE_integer("epochs", 20, "Passes over the training data.")
flags.DEFINE_string("dataset", "digits", "digits, fashion_mnist, mnist, cifar10, ...")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and all else that `launch` takes


def build(image_shape: tuple[int, int, int]):
    """Returns the generator, of noise, and the critic, of images."""
    import keras
    from keras import layers

    height, width, channels = image_shape
    noise = keras.Input((NOISE,))
    x = layers.Dense(height // 4 * (width // 4) * 32, "relu")(noise)
    x = layers.BatchNormalization()(layers.Reshape((height // 4, width // 4, 32))(x))
    x = layers.BatchNormalization()(layers.Conv2DTranspose(32, 4, 2, "same", activation="relu")(x))
    x = layers.Conv2DTranspose(channels, 4, 2, "same", activation="tanh")(x)
    generator = keras.Model(noise, x, name="generator")

    images = keras.Input(image_shape)
    x = layers.LeakyReLU(0.2)(layers.Conv2D(32, 4, 2, "same")(images))
    x = layers.Flatten()(layers.LeakyReLU(0.2)(layers.Conv2D(64, 4, 2, "same")(x)))
    x = layers.LeakyReLU(0.2)(layers.Dense(64)(x))
    return generator, keras.Model(images, layers.Dense(1)(x), name="critic")


def train(runner: "kerasdp.Runner") -> float:
    """Runs in every worker process, after the backend is chosen."""
    import keras
    import numpy as np
    from keras import ops

    config = runner.config
    data = kerasdp.load_data(FLAGS.dataset)
    with runner.scope():
        generator, critic = build(data.input_shape)
        of_generator, of_critic = (keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.9) for _ in range(2))
        seeds = keras.random.SeedGenerator(config.seed)
        distance = keras.metrics.Mean(name="distance")
    of_generator.build(generator.trainable_variables)
    of_critic.build(critic.trainable_variables)

    def noise_for(images):
        return keras.random.normal((ops.shape(images)[0], NOISE), seed=seeds)

    def update_critic(real):
        made = ops.stop_gradient(generator(noise_for(real), training=True))
        share = keras.random.uniform((ops.shape(real)[0], 1, 1, 1), seed=seeds)

        def loss_of():
            slope_of = kerasdp.value_and_grad(lambda mixed: ops.sum(critic(mixed, training=True)))
            _, slope = slope_of(share * real + (1 - share) * made)
            steepness = ops.sqrt(ops.sum(ops.square(slope), axis=(1, 2, 3)) + 1e-12)
            seen = ops.mean(critic(real, training=True)) - ops.mean(critic(made, training=True))
            return 10.0 * ops.mean(ops.square(steepness - 1)) - seen, seen

        (loss, seen), gradients = kerasdp.value_and_grad(loss_of, critic.trainable_variables, has_aux=True)()
        of_critic.apply(gradients, critic.trainable_variables)
        return loss, seen

    @runner.step
    def train_step(batch):
        real = ops.cast(batch[0], keras.config.floatx()) / 127.5 - 1  # the labels are not needed
        for _ in range(CRITIC_UPDATES):
            loss, seen = update_critic(real)
        distance.update_state(seen)
        noise = noise_for(real)

        def loss_of():
            return -ops.mean(critic(generator(noise, training=True), training=True))

        made, gradients = kerasdp.value_and_grad(loss_of, generator.trainable_variables)()
        of_generator.apply(gradients, generator.trainable_variables)
        return {"loss": loss, "generator": made, "distance": distance.result()}

    runner.checkpoint(
        models=[generator, critic], optimizers=[of_generator, of_critic], metrics=distance, variables=seeds
    )
    for batch in runner.batches(data.train, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs):
        if batch.number == 0:
            distance.reset_state()
        logs = train_step(batch)
        runner.log(logs)

    make = runner.step(lambda noise: generator(noise, training=False), returns="rows")
    noise = np.random.RandomState(config.seed).normal(size=(100, NOISE)).astype(keras.config.floatx())
    made = ops.convert_to_numpy(make(noise))
    if runner.is_chief and config.workdir is not None:
        height, width, channels = data.input_shape
        rows = made.reshape(10, 10, height, width, channels).transpose(0, 2, 1, 3, 4)
        path = os.path.join(config.workdir, "made.png")
        keras.utils.save_img(path, rows.reshape(10 * height, 10 * width, channels))
        print(f"made digits: {path}")
    return float(distance.result())


def main(_) -> None:
    """Runs in the process that was started."""
    kerasdp.launch(train, **kerasdp.flags.values())


if __name__ == "__main__":
    app.run(main)
