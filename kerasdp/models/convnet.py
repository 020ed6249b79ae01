"""The small convnet of the Keras guide "Multi-GPU distributed training with PyTorch" (keras.io, 2023)."""

import keras
from keras import layers

from kerasdp.models.inputs import image_input


def convnet(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds three convolutions with batch norm, pooling, a dense layer, dropout.

    Args:
        input_shape: `(height, width, channels)`; the guide has `(28, 28, 1)`.
        num_classes: number of logits.
        kernel_initializer: of every kernel; None: Glorot uniform.

    Returns:
        A model from images (0 to 255), shape `(batch, height, width, channels)`, to logits, `(batch, num_classes)`.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    inputs, x = image_input(input_shape)
    # As in the guide: the second convolution does not pad, and the third one alone has a bias.
    for number, (filters, size, strides, padding, bias) in enumerate(
        [(12, 3, 1, "same", False), (24, 6, 2, "valid", False), (32, 6, 2, "same", True)], 1
    ):
        x = layers.Conv2D(
            filters, size, strides=strides, padding=padding, use_bias=bias, name=f"conv{number}", **kernels
        )(x)
        x = layers.BatchNormalization(scale=False, name=f"norm{number}")(x)
        x = layers.ReLU(name=f"relu{number}")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dense(256, activation="relu", name="dense1", **kernels)(x)
    x = layers.Dropout(0.5, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="convnet")
