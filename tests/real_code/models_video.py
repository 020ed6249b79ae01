"""Models whose outputs or inputs are more than an image, in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, images


@case("vision")
def unet_segmentation(random: np.random.RandomState) -> Ready:
    """A class for each pixel, as probabilities."""
    import keras
    from keras import layers

    inputs = keras.Input((16, 16, 3))
    x = first = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(inputs)))
    x = layers.BatchNormalization()(layers.SeparableConv2D(12, 3, padding="same")(layers.MaxPooling2D()(x)))
    x = layers.BatchNormalization()(layers.Conv2DTranspose(8, 3, padding="same")(layers.Activation("relu")(x)))
    x = layers.Concatenate()([layers.UpSampling2D()(x), first])
    outputs = layers.Conv2D(CLASSES, 3, activation="softmax", padding="same")(x)
    y = random.randint(0, CLASSES, (ROWS, 16, 16, 1)).astype("int32")
    loss = "sparse_categorical_crossentropy"
    return Ready(model=keras.Model(inputs, outputs), x=images(random, 16), y=y, loss=loss)


@case("vision")
def super_resolution(random: np.random.RandomState) -> Ready:
    import keras
    from keras import layers, ops

    class DepthToSpace(layers.Layer):
        def call(self, x: Any) -> Any:
            height, width = x.shape[1], x.shape[2]
            x = ops.transpose(ops.reshape(x, (-1, height, width, 2, 2)), (0, 1, 3, 2, 4))
            return ops.reshape(x, (-1, height * 2, width * 2, 1))

    inputs = keras.Input((8, 8, 1))
    choices = {"activation": "relu", "kernel_initializer": "orthogonal", "padding": "same"}
    x = layers.Conv2D(4, 3, **choices)(layers.Conv2D(8, 5, **choices)(inputs))
    model = keras.Model(inputs, DepthToSpace()(x))
    return Ready(model=model, x=images(random, 8, 1), y=images(random, 16, 1), loss="mean_squared_error")


@case("vision")
def video_conv3d(random: np.random.RandomState) -> Ready:
    import keras
    from keras import layers

    inputs = keras.Input((6, 12, 12, 1))
    x = layers.BatchNormalization()(layers.Conv3D(6, 3, strides=2, activation="relu")(inputs))
    x = layers.Dropout(0.3)(layers.Dense(12, "relu")(layers.GlobalAveragePooling3D()(x)))
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(x))
    x = random.rand(ROWS, 6, 12, 12, 1).astype("float32")
    return Ready(model=model, x=x, y=(classes(random) > 0).astype("float32")[:, None], loss="binary_crossentropy")


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


@case("vision")
def keypoints(random: np.random.RandomState) -> Ready:
    """Two outputs: where, and which; loss weights."""
    import keras
    from keras import layers

    inputs = keras.Input((16, 16, 3))
    x = layers.Flatten()(layers.Conv2D(6, 3, strides=2, activation="leaky_relu")(inputs))
    outputs = {"where": layers.Dense(4, name="where")(x), "which": layers.Dense(CLASSES, "softmax", name="which")(x)}
    loss = {"where": keras.losses.Huber(), "which": "categorical_crossentropy"}
    y = {"where": random.rand(ROWS, 4).astype("float32"), "which": np.eye(CLASSES, dtype="float32")[classes(random)]}
    choices = {"loss_weights": {"where": 2.0, "which": 0.5}, "metrics": {"which": ["accuracy"]}}
    return Ready(model=keras.Model(inputs, outputs), x=images(random, 16), y=y, loss=loss, compile=choices)
