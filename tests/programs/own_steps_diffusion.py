"""A denoising diffusion model with steps of its own, as in Keras' examples."""

import numpy as np
from own_steps_base import BATCH, ROWS, fitted, in_form_of_backend, minimizing, numbers


def network():
    """Takes noisy images and the share of noise in them, gives the noise."""
    import keras
    from keras import layers, ops

    @keras.saving.register_keras_serializable("diffusion")
    def embedded(share):
        angles = ops.array([1.0, 2.0, 4.0], share.dtype) * share
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=3)

    def residual(x):
        normed = layers.BatchNormalization(center=False, scale=False)(x)
        return layers.Add()([x, layers.Conv2D(6, 3, padding="same", activation="swish")(normed)])

    images, share = keras.Input((4, 4, 1)), keras.Input((1, 1, 1))
    embedding = layers.UpSampling2D(4)(layers.Lambda(embedded, output_shape=(1, 1, 6))(share))
    skipped = residual(layers.Conv2D(6, 1)(layers.Concatenate()([images, embedding])))
    x = layers.UpSampling2D(2)(residual(layers.AveragePooling2D(2)(skipped)))
    x = layers.Conv2D(1, 1, kernel_initializer="zeros")(layers.Concatenate()([skipped, x]))
    return keras.Model([images, share], x, name="network")


def diffusion(runner):
    """Images are normalized; noise and times are drawn; a second network follows the first within the step."""
    import keras
    from keras import layers, ops

    class Diffusion(minimizing()):
        def __init__(self):
            super().__init__()
            self.normalizer = layers.Normalization(axis=-1)
            self.network = network()
            self.following = keras.models.clone_model(self.network)
            self.seeds = keras.random.SeedGenerator(11)

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.of_noise, self.of_images = keras.metrics.Mean(name="n_loss"), keras.metrics.Mean(name="i_loss")

        @property
        def metrics(self):
            return [self.of_noise, self.of_images]

        def noisy(self, images):
            rows = ops.shape(images)[0]
            noise = keras.random.normal((rows, 4, 4, 1), seed=self.seeds)
            angles = ops.arccos(0.95) - keras.random.uniform((rows, 1, 1, 1), seed=self.seeds) * 1.2 + 0.2
            signal, share = ops.cos(angles), ops.sin(angles)
            return signal * images + share * noise, noise, signal, share

        def denoised(self, network, noisy, signal, share, training):
            noise = network([noisy, share**2], training=training)
            return noise, (noisy - share * noise) / signal

        def losses_of(self, network, images, training):
            images = self.normalizer(images)
            noisy, noise, signal, share = self.noisy(images)
            noise_found, images_found = self.denoised(network, noisy, signal, share, training)
            return self.loss(noise, noise_found), self.loss(images, images_found)

        def train_step(self, images):
            of_noise, of_images = self.minimize(
                lambda: self.losses_of(self.network, images, training=True),
                self.network.trainable_weights,
                self.optimizer,
                has_aux=True,
            )
            self.of_noise.update_state(of_noise)
            self.of_images.update_state(of_images)
            for weight, following in zip(self.network.weights, self.following.weights, strict=True):
                following.assign(0.9 * following + 0.1 * ops.stop_gradient(weight))
            return {metric.name: metric.result() for metric in self.metrics}

        def test_step(self, images):
            of_noise, of_images = self.losses_of(self.following, images, training=False)
            self.of_noise.update_state(of_noise)
            self.of_images.update_state(of_images)
            return {metric.name: metric.result() for metric in self.metrics}

    x = 3 * numbers(0, ROWS, 4, 4, 1) + 1
    with runner.scope():
        model = in_form_of_backend(Diffusion)()
        model.normalizer.adapt(x)
        model.compile(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.0), loss=keras.losses.MeanAbsoluteError())
    result = fitted(runner, model, x, validation_data=(x[:13],))
    found = runner.evaluate(model, x, batch_size=BATCH, return_dict=True, verbose=0)
    result["evaluated"] = {name: float(value) for name, value in found.items()}
    following = [np.ravel(keras.ops.convert_to_numpy(weight)) for weight in model.following.weights]
    result["following"] = float(np.abs(np.concatenate(following)).sum())
    return result
