"""Models of images and video in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, Ready, case, classes, images


def classifier(outputs_of: Any, random: np.random.RandomState, size: int = 16) -> Ready:
    import keras

    inputs = keras.Input((size, size, 3))
    logits = keras.layers.Dense(CLASSES)(outputs_of(inputs))
    return Ready(model=keras.Model(inputs, logits), x=images(random, size), y=classes(random))


def patches_of(inputs: Any, width: int, size: int = 4) -> Any:
    from keras import layers

    x = layers.Conv2D(width, size, strides=size)(inputs)
    return layers.Reshape((-1, width))(x)


@case("vision")
def convnet(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(x: Any) -> Any:
        for filters in (8, 12):
            x = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x))
            x = layers.MaxPooling2D()(layers.Dropout(0.2)(layers.Activation("relu")(x)))
        return layers.Dropout(0.5)(layers.Flatten()(x))

    return classifier(outputs_of, random)


@case("vision")
def augmented_convnet(random: np.random.RandomState) -> Ready:
    """Random pictures within the model, as the guide on transfer learning has them."""
    from keras import layers

    def outputs_of(x: Any) -> Any:
        x = layers.RandomContrast(0.2)(layers.RandomBrightness(0.2, value_range=(0, 1))(layers.RandomFlip()(x)))
        x = layers.GaussianNoise(0.1)(x)
        return layers.GlobalMaxPooling2D()(layers.Conv2D(8, 3, activation="relu")(x))

    return classifier(outputs_of, random)


@case("vision")
def vision_transformer(random: np.random.RandomState) -> Ready:
    import keras
    from keras import layers, ops

    class AddPositions(layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = layers.Embedding(shape[1], shape[2])
            self.table.build((None,))

        def call(self, x: Any) -> Any:
            return x + self.table(ops.expand_dims(ops.arange(x.shape[1]), 0))

    def outputs_of(inputs: Any) -> Any:
        x = AddPositions()(patches_of(inputs, 16))
        for _ in range(2):
            y = layers.LayerNormalization(epsilon=1e-6)(x)
            x = layers.Add()([layers.MultiHeadAttention(2, 8, dropout=0.1)(y, y), x])
            y = layers.Dense(24, activation=keras.activations.gelu)(layers.LayerNormalization(epsilon=1e-6)(x))
            x = layers.Add()([layers.Dense(16)(layers.Dropout(0.1)(y)), x])
        return layers.Dropout(0.5)(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x)))

    return classifier(outputs_of, random)


@case("vision")
def mlp_mixer(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(inputs: Any) -> Any:
        x = patches_of(inputs, 12)
        for _ in range(2):
            y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
            y = layers.Dense(16)(layers.Dropout(0.2)(layers.Dense(20, "gelu")(y)))
            x = x + layers.Permute((2, 1))(y)
            x = x + layers.Dense(12)(layers.Dropout(0.2)(layers.Dense(20, "gelu")(layers.LayerNormalization()(x))))
        return layers.GlobalAveragePooling1D()(x)

    return classifier(outputs_of, random)


@case("vision")
def conv_mixer(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(inputs: Any) -> Any:
        x = layers.BatchNormalization()(layers.Activation("gelu")(layers.Conv2D(12, 2, strides=2)(inputs)))
        for _ in range(2):
            y = layers.Activation("gelu")(layers.DepthwiseConv2D(3, padding="same")(x))
            x = x + layers.BatchNormalization()(y)
            x = layers.BatchNormalization()(layers.Activation("gelu")(layers.Conv2D(12, 1)(x)))
        return layers.GlobalAveragePooling2D()(x)

    return classifier(outputs_of, random)


@case("vision")
def swin_by_hand(random: np.random.RandomState) -> Ready:
    """Windows of 2x2 patches are folded into the batch axis; every second block shifts them."""
    from keras import layers, ops

    class WindowAttention(layers.Layer):
        def __init__(self, width: int, window: int, shift: int):
            super().__init__()
            self.width, self.window, self.shift = width, window, shift
            self.attention = layers.MultiHeadAttention(2, width // 2, dropout=0.2)
            self.drop = layers.Dropout(0.2)

        def build(self, shape: Any) -> None:
            self.attention.build((None, self.window**2, self.width), (None, self.window**2, self.width))

        def call(self, x: Any) -> Any:
            side, window = x.shape[1], self.window
            x = ops.roll(x, (-self.shift, -self.shift), (1, 2))
            x = ops.reshape(x, (-1, side // window, window, side // window, window, self.width))
            x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, window * window, self.width))
            x = self.drop(self.attention(x, x))
            x = ops.reshape(x, (-1, side // window, side // window, window, window, self.width))
            x = ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, side, side, self.width))
            return ops.roll(x, (self.shift, self.shift), (1, 2))

    def outputs_of(inputs: Any) -> Any:
        x = layers.Conv2D(12, 4, strides=4)(inputs)
        for shift in (0, 1):
            x = x + WindowAttention(12, 2, shift)(layers.LayerNormalization()(x))
            x = x + layers.Dense(12)(layers.Dense(20, "gelu")(layers.LayerNormalization()(x)))
        return layers.GlobalAveragePooling2D()(x)

    return classifier(outputs_of, random)


@case("vision")
def compact_transformer(random: np.random.RandomState) -> Ready:
    """Tokens by convolution, stochastic depth, and a pooling that weighs the tokens."""
    import keras
    from keras import layers, ops

    class StochasticDepth(layers.Layer):
        def __init__(self, rate: float):
            super().__init__()
            self.rate, self.seed_generator = rate, keras.random.SeedGenerator(1337)

        def call(self, x: Any, training: bool = False) -> Any:
            if not training:
                return x
            keep = 1 - self.rate
            shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
            return x / keep * ops.floor(keep + keras.random.uniform(shape, seed=self.seed_generator))

    def outputs_of(inputs: Any) -> Any:
        x = layers.MaxPooling2D(3, 2, "same")(layers.Conv2D(12, 3, padding="same", activation="relu")(inputs))
        x = layers.Reshape((-1, 12))(layers.AveragePooling2D(2)(x))
        for _ in range(2):
            y = layers.LayerNormalization(epsilon=1e-5)(x)
            x = StochasticDepth(0.2)(layers.MultiHeadAttention(2, 12, dropout=0.1)(y, y)) + x
            x = StochasticDepth(0.2)(layers.Dense(12)(layers.Dense(20, "gelu")(layers.LayerNormalization()(x)))) + x
        weights = layers.Softmax(axis=1)(layers.Dense(1)(x))
        return layers.Flatten()(layers.Dot(1)([weights, x]))

    return classifier(outputs_of, random)


@case("vision")
def involution(random: np.random.RandomState) -> Ready:
    """Kernels that are made from the image, applied to patches."""
    from keras import layers, ops

    class Involution(layers.Layer):
        def build(self, shape: Any) -> None:
            self.reduce, self.norm, self.span = layers.Conv2D(4, 1), layers.BatchNormalization(), layers.Conv2D(9, 1)
            self.reduce.build(shape)
            self.norm.build((*shape[:-1], 4))
            self.span.build((*shape[:-1], 4))

        def call(self, x: Any, training: bool = False) -> Any:
            side, channels = x.shape[1], x.shape[-1]
            kernel = self.span(ops.relu(self.norm(self.reduce(x), training=training)))
            patches = ops.image.extract_patches(x, (3, 3), strides=1, padding="same")
            patches = ops.reshape(patches, (-1, side, side, 9, channels))
            return ops.sum(patches * ops.expand_dims(kernel, -1), axis=3)

    def outputs_of(inputs: Any) -> Any:
        x = layers.Activation("relu")(Involution()(inputs))
        x = layers.Activation("relu")(Involution()(layers.MaxPooling2D()(x)))
        return layers.Dense(16, "relu")(layers.Flatten()(x))

    return classifier(outputs_of, random)


@case("vision")
def perceiver(random: np.random.RandomState) -> Ready:
    """A few latent vectors, which are weights, look at the patches again and again."""
    from keras import layers, ops

    class Latents(layers.Layer):
        def build(self, shape: Any) -> None:
            self.latents = self.add_weight(shape=(6, 12), initializer="random_normal")

        def call(self, x: Any) -> Any:
            return ops.repeat(ops.expand_dims(self.latents, 0), ops.shape(x)[0], axis=0)

    def outputs_of(inputs: Any) -> Any:
        x = patches_of(inputs, 12)
        latents, look = Latents()(x), layers.MultiHeadAttention(1, 12, dropout=0.1)
        for _ in range(2):
            latents = layers.LayerNormalization()(latents + look(latents, x))
            latents = layers.LayerNormalization()(latents + layers.MultiHeadAttention(2, 6)(latents, latents))
        return layers.GlobalAveragePooling1D()(latents)

    return classifier(outputs_of, random)


@case("vision")
def squeeze_and_excite(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(inputs: Any) -> Any:
        x = layers.SeparableConv2D(12, 3, padding="same", activation="swish")(inputs)
        gate = layers.Dense(12, "sigmoid")(layers.Dense(4, "relu")(layers.GlobalAveragePooling2D(keepdims=True)(x)))
        x = layers.GroupNormalization(4)(layers.Multiply()([x, gate]))
        return layers.GlobalAveragePooling2D()(layers.SpatialDropout2D(0.2)(x))

    return classifier(outputs_of, random)
