"""LeNet with ReLU, as in the d2l.ai chapter on multi-GPU training from scratch (after LeCun et al. 1998)."""

import keras
from keras import layers

from kerasdp.models.inputs import image_input


def lenet(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds two convolutions with average pooling, then two dense layers.

    Args:
        input_shape: `(height, width, channels)`; the published network has `(28, 28, 1)`.
        num_classes: number of logits.
        kernel_initializer: of every kernel; None: Glorot uniform.

    Returns:
        A model from images (0 to 255), shape `(batch, height, width, channels)`, to logits, `(batch, num_classes)`.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    inputs, x = image_input(input_shape)
    x = layers.Conv2D(20, 3, activation="relu", name="conv1", **kernels)(x)
    x = layers.AveragePooling2D(2, name="pool1")(x)
    x = layers.Conv2D(50, 5, activation="relu", name="conv2", **kernels)(x)
    x = layers.AveragePooling2D(2, name="pool2")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(128, activation="relu", name="dense1", **kernels)(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="lenet")
