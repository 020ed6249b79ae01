"""The toy model of the PyTorch tutorial on model parallelism: two dense layers, 10-10-5."""

import keras
from keras import layers

from kerasdp.models.inputs import image_input


def mlp(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds two dense layers, the hidden one of 10 units.

    Args:
        input_shape: `(height, width, channels)` of an image from 0 to 255, or `(features,)`, which are not scaled;
            the published toy has `(10,)` and 5 outputs.
        num_classes: number of logits.
        kernel_initializer: of both kernels; None: Glorot uniform.

    Returns:
        A model from `(batch, *input_shape)` to logits, `(batch, num_classes)`.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    if len(input_shape) == 1:
        inputs = x = keras.Input(input_shape, name="features")
    else:
        inputs, x = image_input(input_shape)
        x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(10, activation="relu", name="dense1", **kernels)(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="mlp")
