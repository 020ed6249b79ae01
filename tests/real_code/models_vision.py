"""Models of images and video in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, images


def classifier(outputs_of: Any, random: np.random.RandomState, size: int = 16) -> Ready:
    import keras

    inputs = keras.Input((size, size, 3))
    logits = keras.layers.Dense(CLASSES)(outputs_of(inputs))
    return Ready(model=keras.Model(inputs, logits), x=images(random, size), y=classes(random))


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
        x = layers.Reshape((-1, 12))(layers.Conv2D(12, 4, strides=4)(inputs))
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


@case("vision")
def video_frames_then_rnn(random: np.random.RandomState) -> Ready:
    """The same small net for each frame, with dropout and batch norm, then a GRU over frames that may be missing."""
    import keras
    from keras import layers

    frame = keras.Sequential([layers.Conv2D(6, 3), layers.BatchNormalization(), layers.Activation("relu"),
                              layers.Dropout(0.2), layers.GlobalAveragePooling2D()])  # fmt: skip
    frames, mask = keras.Input((5, 10, 10, 3)), keras.Input((5,), dtype="bool")
    x = layers.GRU(8, return_sequences=True)(layers.TimeDistributed(frame)(frames), mask=mask)
    logits = layers.Dense(CLASSES)(layers.Dropout(0.4)(layers.GRU(6)(x)))
    there = np.arange(5) < random.randint(2, 6, (ROWS, 1))
    x = [random.rand(ROWS, 5, 10, 10, 3).astype("float32"), there]
    return Ready(model=keras.Model([frames, mask], logits), x=x, y=classes(random))


@case("vision")
def next_frame_conv_lstm(random: np.random.RandomState) -> Ready:
    import keras
    from keras import layers

    inputs = keras.Input((4, 8, 8, 1))
    x = layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True, activation="relu", dropout=0.1)(inputs)
    x = layers.ConvLSTM2D(4, 1, padding="same", return_sequences=True)(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Conv3D(1, 3, activation="sigmoid", padding="same")(x))
    x = random.rand(ROWS, 4, 8, 8, 1).astype("float32")
    return Ready(
        model=model, x=x, y=(random.rand(ROWS, 4, 8, 8, 1) > 0.5).astype("float32"), loss="binary_crossentropy"
    )
