"""Generative models in the manner of keras.io's examples, without a train_step of their own."""

from typing import Any

import numpy as np

from tests.real_code.cases import ROWS, Ready, case, images


@case("generative")
def denoising_autoencoder(random: np.random.RandomState) -> Ready:
    import keras
    from keras import layers

    inputs = keras.Input((16, 16, 1))
    x = layers.MaxPooling2D()(layers.Conv2D(8, 3, activation="relu", padding="same")(inputs))
    x = layers.Conv2DTranspose(8, 3, strides=2, activation="relu", padding="same")(x)
    model = keras.Model(inputs, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))
    clean = images(random, 16, 1)
    noisy = np.clip(clean + 0.3 * random.randn(*clean.shape), 0, 1).astype("float32")
    return Ready(model=model, x=noisy, y=clean, loss="binary_crossentropy")


def _encoder_and_decoder() -> tuple[Any, Any]:
    import keras
    from keras import layers

    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(16, "relu")(layers.Flatten()(layers.Conv2D(6, 3, strides=2, activation="relu")(inputs)))
    encoder = keras.Model(inputs, [layers.Dense(2)(x), layers.Dense(2)(x)])
    latent = keras.Input((2,))
    x = layers.Reshape((4, 4, 6))(layers.Dense(96, "relu")(latent))
    decoder = keras.Model(latent, layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")(x))
    return encoder, decoder


def _sampling() -> Any:
    import keras
    from keras import layers, ops

    class Sampling(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(1337)

        def call(self, parts: Any) -> Any:
            mean, log_variance = parts
            noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
            return mean + ops.exp(0.5 * log_variance) * noise

    return Sampling()


@case("generative")
def variational_autoencoder_compute_loss(random: np.random.RandomState) -> Ready:
    """The divergence is an output; the model's compute_loss adds it."""
    import keras
    from keras import ops

    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            (self.encoder, self.decoder), self.sampling = _encoder_and_decoder(), _sampling()

        def call(self, x: Any) -> Any:
            mean, log_variance = self.encoder(x)
            kl = -0.5 * ops.sum(1 + log_variance - ops.square(mean) - ops.exp(log_variance), -1)
            return self.decoder(self.sampling([mean, log_variance])), kl

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
            image, kl = y_pred
            return ops.mean(ops.sum(keras.losses.binary_crossentropy(y, image), (1, 2)) + kl)

    x = images(random, 8, 1)
    return Ready(model=Autoencoder(), x=x, y=x, loss="mse")


@case("generative")
def variational_autoencoder_add_loss(random: np.random.RandomState) -> Ready:
    """A layer adds the divergence to the loss of the reconstruction."""
    import keras
    from keras import layers, ops

    class Divergence(layers.Layer):
        def call(self, parts: Any) -> Any:
            mean, log_variance = parts
            self.add_loss(-0.5 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
            return parts

    encoder, decoder = _encoder_and_decoder()
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, decoder(_sampling()(Divergence()(encoder(inputs)))))
    x = images(random, 8, 1)
    return Ready(model=model, x=x, y=x, loss="mean_squared_error")


@case("generative")
def vector_quantized_autoencoder(random: np.random.RandomState) -> Ready:
    """Straight through the nearest code; the codes' loss is in compute_loss."""
    import keras
    from keras import layers, ops

    class Codes(layers.Layer):
        def build(self, shape: Any) -> None:
            self.codes = self.add_weight(shape=(6, shape[-1]), initializer="random_uniform")

        def call(self, x: Any) -> Any:
            apart = ops.sum(ops.square(ops.expand_dims(x, -2) - self.codes), -1)
            nearest = ops.take(self.codes, ops.argmin(apart, -1), axis=0)
            commitment = ops.square(ops.stop_gradient(nearest) - x) + ops.square(nearest - ops.stop_gradient(x))
            return x + ops.stop_gradient(nearest - x), ops.mean(commitment, (1, 2, 3))

    class Autoencoder(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
            image, commitment = y_pred
            return ops.mean(ops.mean(ops.square(y - image), (1, 2, 3)) + commitment)

    inputs = keras.Input((8, 8, 1))
    x, commitment = Codes()(layers.Conv2D(4, 3, strides=2, padding="same")(inputs))
    outputs = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(x)
    x = images(random, 8, 1)
    return Ready(model=Autoencoder(inputs, [outputs, commitment]), x=x, y=x, loss="mse")


@case("generative")
def unet_denoiser(random: np.random.RandomState) -> Ready:
    """Tells the noise of a noisy image, given how much there is."""
    import keras
    from keras import layers, ops

    class Waves(layers.Layer):
        def call(self, x: Any) -> Any:
            angles = ops.cast(2 * np.pi * np.exp(np.linspace(0, 4, 4)), x.dtype) * x
            return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)

    def block(x: Any, width: int) -> Any:
        y = layers.BatchNormalization(center=False, scale=False)(x)
        y = layers.Conv2D(width, 3, padding="same")(layers.Conv2D(width, 3, padding="same", activation="swish")(y))
        return layers.Add()([layers.Conv2D(width, 1)(x), y])

    noisy, variance = keras.Input((16, 16, 3)), keras.Input((1, 1, 1))
    x = layers.Concatenate()([layers.Conv2D(8, 1)(noisy), layers.UpSampling2D(16)(Waves()(variance))])
    first = block(x, 8)
    x = layers.UpSampling2D(interpolation="bilinear")(block(layers.AveragePooling2D(2)(first), 12))
    x = block(layers.Concatenate()([x, first]), 8)
    model = keras.Model([noisy, variance], layers.Conv2D(3, 1, kernel_initializer="zeros")(x))
    x = [random.randn(ROWS, 16, 16, 3).astype("float32"), random.rand(ROWS, 1, 1, 1).astype("float32")]
    return Ready(model=model, x=x, y=random.randn(ROWS, 16, 16, 3).astype("float32"), loss="mean_absolute_error")


@case("generative")
def diffusion_in_compute_loss(random: np.random.RandomState) -> Ready:
    """The model draws noise and times itself, in call."""
    import keras
    from keras import layers, ops

    class Diffusion(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(3)
            self.net = keras.Sequential([layers.Conv2D(8, 3, padding="same", activation="swish"),
                                         layers.Dropout(0.1), layers.Conv2D(1, 3, padding="same")])  # fmt: skip

        def call(self, x: Any, training: bool = False) -> Any:
            time = keras.random.uniform((ops.shape(x)[0], 1, 1, 1), seed=self.seed_generator)
            noise = keras.random.normal(ops.shape(x), seed=self.seed_generator)
            noisy = ops.cos(time) * x + ops.sin(time) * noise
            return self.net(noisy, training=training) - noise

    x = images(random, 8, 1)
    return Ready(model=Diffusion(), x=x, y=np.zeros_like(x), loss="mean_squared_error")


@case("generative")
def pixel_cnn(random: np.random.RandomState) -> Ready:
    """Convolutions that see only what is above and to the left."""
    import keras
    from keras import layers, ops

    class MaskedConv(layers.Layer):
        def __init__(self, with_center: bool, filters: int, size: int):
            super().__init__()
            self.with_center, self.conv = with_center, layers.Conv2D(filters, size, padding="same", activation="relu")

        def build(self, shape: Any) -> None:
            self.conv.build(shape)
            mask = np.zeros(self.conv.kernel.shape, "float32")
            half = mask.shape[0] // 2
            mask[:half] = mask[half, :half] = 1
            mask[half, half] = self.with_center
            self.mask = mask

        def call(self, x: Any) -> Any:
            kernel = self.conv.kernel * ops.cast(self.mask, self.conv.kernel.dtype)
            return ops.relu(ops.conv(x, kernel, padding="same") + self.conv.bias)

    inputs = keras.Input((8, 8, 1))
    x = MaskedConv(False, 8, 5)(inputs)
    x = layers.Add()([x, MaskedConv(True, 8, 3)(x)])
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    x = (images(random, 8, 1) > 0.4).astype("float32")
    return Ready(model=model, x=x, y=x, loss="binary_crossentropy")


@case("generative")
def radiance_field(random: np.random.RandomState) -> Ready:
    """Colours of points in space, by a deep net with a shortcut."""
    import keras
    from keras import layers

    inputs = keras.Input((20, 12))
    x = inputs
    for number in range(4):
        x = layers.Dense(16, "relu")(x)
        x = layers.Concatenate()([x, inputs]) if number == 2 else x
    model = keras.Model(inputs, layers.Dense(4)(x))
    x, y = random.randn(ROWS, 20, 12).astype("float32"), random.rand(ROWS, 20, 4).astype("float32")
    return Ready(model=model, x=x, y=y, loss="mean_squared_error")


@case("generative")
def normalizing_flow(random: np.random.RandomState) -> Ready:
    """Coupling layers; the loss is the negative likelihood of what comes out."""
    import keras
    from keras import layers, ops

    inputs = keras.Input((4,))
    x, logarithms = inputs, []
    for number in range(3):
        left, right = (x[:, :2], x[:, 2:]) if number % 2 else (x[:, 2:], x[:, :2])
        scale = layers.Dense(2, "tanh")(layers.Dense(12, "relu")(left))
        right = right * ops.exp(scale) + layers.Dense(2)(layers.Dense(12, "relu")(left))
        logarithms.append(ops.sum(scale, -1, keepdims=True))
        x = ops.concatenate([left, right], -1)
    model = keras.Model(inputs, ops.concatenate([x, sum(logarithms)], -1))

    def likelihood(y_true: Any, y_pred: Any) -> Any:
        return 0.5 * ops.sum(ops.square(y_pred[:, :4]), -1) - y_pred[:, 4]

    x = random.randn(ROWS, 4).astype("float32")
    return Ready(model=model, x=x, y=x, loss=likelihood)
