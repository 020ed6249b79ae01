"""Builds small forms of models that are no transformers, in plain Keras.

An LSTM tagger, the U-Net of a diffusion model, and an EfficientNetV2.
"""

import keras
import protocol
from keras import layers, ops


def tagger(vocabulary: int, width: int) -> keras.Model:
    """Builds a recurrent net in both directions that says of each token what it is; the padding is masked.

    Args:
        vocabulary: how many tokens there are.
        width: numbers a token, and units of each direction.

    Returns:
        A model from tokens `(batch, length)`, padded at their ends with 0, to logits `(batch, length, classes)`.
    """
    inputs = keras.Input(protocol.SHAPES["tagger"], dtype="int32", name="token_ids")
    x = layers.Embedding(vocabulary, width, mask_zero=True, name="tokens")(inputs)
    x = layers.Bidirectional(layers.LSTM(width, return_sequences=True, name="lstm"), name="recurrent")(x)
    return keras.Model(inputs, layers.Dense(protocol.NUM_CLASSES, name="logits")(x), name="tagger")


class TimestepEmbedding(layers.Layer):
    """Says where in the noising an image is by sines and cosines; `(batch,)` becomes `(batch, width)`."""

    def __init__(self, width: int, **kwargs: object):
        super().__init__(**kwargs)
        self.width = width

    def call(self, timestep: keras.KerasTensor) -> keras.KerasTensor:
        """Computes them."""
        half = self.width // 2
        waves = protocol.LONGEST_WAVE ** (-ops.arange(half, dtype="float32") / half)
        angles = ops.expand_dims(ops.cast(timestep, "float32"), 1) * waves
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], -1)


def normed(name: str, x: keras.KerasTensor) -> keras.KerasTensor:
    """Applies group norm and swish."""
    return layers.Activation("swish")(layers.GroupNormalization(protocol.NUM_GROUPS, epsilon=1e-5, name=name)(x))


def residual(name: str, x: keras.KerasTensor, filters: int, time: keras.KerasTensor) -> keras.KerasTensor:
    """Builds two convolutions, between which the timestep is added, and a shortcut."""
    y = layers.Conv2D(filters, 3, padding="same", name=f"{name}_conv1")(normed(f"{name}_norm1", x))
    added = layers.Reshape((1, 1, filters))(layers.Dense(filters, name=f"{name}_time")(time))
    y = normed(f"{name}_norm2", layers.Add()([y, added]))
    y = layers.Conv2D(filters, 3, padding="same", name=f"{name}_conv2")(y)
    if x.shape[-1] != filters:
        x = layers.Conv2D(filters, 1, name=f"{name}_shortcut")(x)
    return layers.Add(name=f"{name}_add")([x, y])


def unet(width: int) -> keras.Model:
    """Builds what says which noise is in an image (Ho et al. 2020, arXiv:2006.11239).

    Args:
        width: filters of the first convolution.

    Returns:
        A model from `image`, `(batch, height, width, 3)`, and `timestep`, `(batch,)`, to the noise, as large as images.
    """
    shape, filters = protocol.SHAPES["unet"], [width, 2 * width, 4 * width]
    image, timestep = keras.Input(shape, name="image"), keras.Input((), dtype="int32", name="timestep")
    time = layers.Dense(4 * width, "swish", name="time1")(TimestepEmbedding(width, name="waves")(timestep))
    time = layers.Dense(4 * width, "swish", name="time2")(time)
    x = layers.Conv2D(width, 3, padding="same", name="stem")(image)
    kept = []
    for level, count in enumerate(filters):
        x = residual(f"down{level}", x, count, time)
        kept.append(x)
        if level < len(filters) - 1:
            x = layers.Conv2D(count, 3, 2, padding="same", name=f"halve{level}")(x)
    x = residual("first", x, filters[-1], time)
    y = layers.GroupNormalization(protocol.NUM_GROUPS, epsilon=1e-5, name="middle_norm")(x)
    y = layers.Reshape((-1, filters[-1]))(y)
    y = layers.MultiHeadAttention(protocol.NUM_HEADS, filters[-1] // protocol.NUM_HEADS, name="middle_attention")(y, y)
    x = layers.Add(name="middle_add")([x, layers.Reshape(x.shape[1:])(y)])
    x = residual("second", x, filters[-1], time)
    for level, count in reversed(list(enumerate(filters))):
        x = residual(f"up{level}", layers.Concatenate()([x, kept.pop()]), count, time)
        if level:
            x = layers.Conv2D(count, 3, padding="same", name=f"double{level}")(layers.UpSampling2D(2)(x))
    noise = layers.Conv2D(3, 3, padding="same", name="noise")(normed("norm", x))
    return keras.Model({"image": image, "timestep": timestep}, noise, name="unet")


def conv_norm(
    name: str, x: keras.KerasTensor, filters: int | None, size: int = 1, strides: int = 1, is_active: bool = True
) -> keras.KerasTensor:
    """Builds a convolution, of each filter alone if `filters` is None, batch norm, and swish."""
    if filters is None:
        x = layers.DepthwiseConv2D(size, strides, padding="same", use_bias=False, name=name)(x)
    else:
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False, name=name)(x)
    x = layers.BatchNormalization(momentum=0.9, name=f"{name}_norm")(x)
    return layers.Activation("swish", name=f"{name}_swish")(x) if is_active else x


def inverted(
    name: str, x: keras.KerasTensor, filters: int, strides: int, widening: int, is_fused: bool
) -> keras.KerasTensor:
    """Builds a block that is wider within: fused, or depthwise with squeeze and excitation; with a shortcut."""
    wide = widening * x.shape[-1]
    if is_fused:
        y = conv_norm(f"{name}_expand", x, wide if widening > 1 else filters, 3, strides)
    else:
        y = conv_norm(f"{name}_depthwise", conv_norm(f"{name}_expand", x, wide), None, 3, strides)
        mean = layers.GlobalAveragePooling2D(keepdims=True, name=f"{name}_mean")(y)
        mean = layers.Conv2D(x.shape[-1] // 4, 1, activation="swish", name=f"{name}_squeeze")(mean)
        excited = layers.Conv2D(wide, 1, activation="sigmoid", name=f"{name}_excite")(mean)
        y = layers.Multiply(name=f"{name}_excited")([y, excited])
    if widening > 1:
        y = conv_norm(f"{name}_project", y, filters, is_active=False)
    return layers.Add(name=f"{name}_add")([x, y]) if strides == 1 and x.shape[-1] == filters else y


def efficientnet(width: int) -> keras.Model:
    """Builds a short EfficientNetV2 (Tan & Le 2021, arXiv:2104.00298), as keras.applications does, without dropout.

    Args:
        width: filters of the first convolution.

    Returns:
        A model from images (0 to 255), `(batch, height, width, 3)`, to logits `(batch, classes)`.
    """
    inputs = keras.Input(protocol.SHAPES["efficientnet"], name="image")
    x = conv_norm("stem", layers.Rescaling(1.0 / 255, name="rescaling")(inputs), width, 3, 2)
    for stage, (is_fused, num_blocks, part, strides, widening) in enumerate(protocol.STAGES, 1):
        for block in range(1, num_blocks + 1):
            name = f"stage{stage}_block{block}"
            x = inverted(name, x, int(part * width), strides if block == 1 else 1, widening, is_fused)
    x = layers.GlobalAveragePooling2D(name="mean")(conv_norm("head", x, 12 * width))
    return keras.Model(inputs, layers.Dense(protocol.NUM_CLASSES, name="logits")(x), name="efficientnet")
