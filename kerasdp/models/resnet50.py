"""ResNet-50 (He et al. 2016, arXiv:1512.03385), with the stride in the 3x3 convolution, as torchvision has it."""

from typing import Any

import keras
from keras import layers

from kerasdp.models.inputs import image_input


def resnet50(input_shape: tuple[int, ...], num_classes: int, kernel_initializer: str | None = None) -> keras.Model:
    """Builds a 7x7 stem with max-pooling and four stages of 3, 4, 6, 3 bottleneck blocks: 25.6 million parameters.

    Args:
        input_shape: `(height, width, channels)`; the paper has `(224, 224, 3)`.
        num_classes: number of logits; the paper has 1000.
        kernel_initializer: of every kernel; None: He normal, as in the paper.

    Returns:
        A model from images (0 to 255), shape `(batch, height, width, channels)`, to logits, `(batch, num_classes)`.
    """
    kernels = {"kernel_initializer": kernel_initializer or "he_normal"}
    inputs, x = image_input(input_shape)
    x = layers.ZeroPadding2D(3, name="stem_pad")(x)
    x = _conv_norm(x, 64, 7, strides=2, name="stem", kernels=kernels)
    x = layers.ReLU(name="stem_relu")(x)
    x = layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = layers.MaxPooling2D(3, strides=2, name="stem_pool")(x)
    for stage, (filters, num_blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], 1):
        for block in range(1, num_blocks + 1):
            strides = 2 if block == 1 and stage > 1 else 1
            x = _bottleneck(x, filters, strides, block == 1, f"stage{stage}_block{block}", kernels)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits", **kernels)(x), name="resnet50")


def _bottleneck(
    x: keras.KerasTensor, filters: int, strides: int, widen: bool, name: str, kernels: dict[str, Any]
) -> keras.KerasTensor:
    """Adds 1x1, 3x3, 1x1 convolutions and the shortcut, which `widen` convolves, too; gives `4 * filters` channels."""
    shortcut = _conv_norm(x, 4 * filters, 1, strides, f"{name}_shortcut", kernels) if widen else x
    x = layers.ReLU(name=f"{name}_relu1")(_conv_norm(x, filters, 1, 1, f"{name}_1", kernels))
    x = layers.ZeroPadding2D(1, name=f"{name}_pad")(x)
    x = layers.ReLU(name=f"{name}_relu2")(_conv_norm(x, filters, 3, strides, f"{name}_2", kernels))
    x = _conv_norm(x, 4 * filters, 1, 1, f"{name}_3", kernels)
    return layers.ReLU(name=f"{name}_relu3")(layers.Add(name=f"{name}_add")([x, shortcut]))


def _conv_norm(
    x: keras.KerasTensor, filters: int, size: int, strides: int, name: str, kernels: dict[str, Any]
) -> keras.KerasTensor:
    x = layers.Conv2D(filters, size, strides=strides, use_bias=False, name=f"{name}_conv", **kernels)(x)
    return layers.BatchNormalization(epsilon=1e-5, momentum=0.9, name=f"{name}_norm")(x)
