"""ResNet-18 for 28x28 images, as in d2l.ai 13.6 (He et al. 2016, arXiv:1512.03385)."""

from typing import Any

import keras
from keras import layers

from kerasdp.models.inputs import image_input


def resnet18(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds a 3x3 stem without max-pooling and four stages of two residual blocks: 64, 128, 256, 512 filters.

    Args:
        input_shape: `(height, width, channels)`; the book has `(28, 28, 1)`.
        num_classes: number of logits.
        kernel_initializer: of every kernel; None: Glorot uniform. The book has `random_normal(stddev=0.01)`.

    Returns:
        A model from images (0 to 255), shape `(batch, height, width, channels)`, to logits, `(batch, num_classes)`.
    """
    kernels = {"kernel_initializer": kernel_initializer or "glorot_uniform"}
    inputs, x = image_input(input_shape)
    x = layers.Conv2D(64, 3, padding="same", name="stem_conv", **kernels)(x)
    x = layers.BatchNormalization(name="stem_norm")(x)
    x = layers.ReLU(name="stem_relu")(x)
    for stage, filters in enumerate((64, 128, 256, 512), 1):
        x = _block(x, filters, strides=1 if stage == 1 else 2, name=f"stage{stage}_block1", kernels=kernels)
        x = _block(x, filters, strides=1, name=f"stage{stage}_block2", kernels=kernels)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="resnet18")


def _block(
    x: keras.KerasTensor, filters: int, *, strides: int, name: str, kernels: dict[str, Any]
) -> keras.KerasTensor:
    """Adds conv-BN-ReLU-conv-BN, plus the shortcut, ReLU; convolutions have a bias. `strides=2` halves the image."""
    shortcut = x
    if strides != 1:
        shortcut = layers.Conv2D(filters, 1, strides=strides, name=f"{name}_shortcut", **kernels)(x)
    x = _conv(x, filters, strides, f"{name}_conv1", kernels)
    x = layers.BatchNormalization(name=f"{name}_norm1")(x)
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = _conv(x, filters, 1, f"{name}_conv2", kernels)
    x = layers.BatchNormalization(name=f"{name}_norm2")(x)
    return layers.ReLU(name=f"{name}_relu2")(layers.Add(name=f"{name}_add")([x, shortcut]))


def _conv(x: keras.KerasTensor, filters: int, strides: int, name: str, kernels: dict[str, Any]) -> keras.KerasTensor:
    if strides == 1:
        return layers.Conv2D(filters, 3, padding="same", name=name, **kernels)(x)
    # "same" with a stride pads only right and below; the paper's network (and PyTorch's) pads one pixel all around.
    x = layers.ZeroPadding2D(1, name=f"{name}_pad")(x)
    return layers.Conv2D(filters, 3, strides=strides, name=name, **kernels)(x)
