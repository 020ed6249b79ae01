"""Builds small transformers as KerasHub has them, in plain Keras: BERT and ViT.

Blocks are layers that hold layers, as in `keras_hub.layers.TransformerEncoder`.
"""

import keras
import protocol
from keras import layers, ops


class EncoderBlock(layers.Layer):
    """Attention and two dense layers, each with a shortcut and layer norm; `(batch, length, width)` stays so.

    Args:
        is_norm_first: whether layer norm is before attention and dense layers, as in ViT, or after the shortcut, as in
            BERT.
        epsilon: of layer norm.
        activation: between the dense layers.
    """

    def __init__(self, is_norm_first: bool, epsilon: float, activation: object, **kwargs: object):
        super().__init__(**kwargs)
        self.is_norm_first, self.epsilon, self.activation = is_norm_first, epsilon, activation

    def build(self, input_shape: tuple[int, ...]) -> None:
        """Makes the layers and their weights."""
        width = input_shape[-1]
        self.attention = layers.MultiHeadAttention(protocol.NUM_HEADS, width // protocol.NUM_HEADS, name="attention")
        self.attention.build(input_shape, input_shape)
        self.up = layers.Dense(4 * width, self.activation, name="up")
        self.down = layers.Dense(width, name="down")
        self.down.build((*input_shape[:-1], 4 * width))
        self.norm1 = layers.LayerNormalization(epsilon=self.epsilon, name="norm1")
        self.norm2 = layers.LayerNormalization(epsilon=self.epsilon, name="norm2")
        for layer in (self.up, self.norm1, self.norm2):
            layer.build(input_shape)
        super().build(input_shape)

    def call(self, x: keras.KerasTensor, padding_mask: keras.KerasTensor | None = None) -> keras.KerasTensor:
        """Computes the block; `padding_mask`: `(batch, length)`, 0 where nobody attends to."""
        mask = None if padding_mask is None else ops.expand_dims(padding_mask, 1)
        y = self.norm1(x) if self.is_norm_first else x
        x = x + self.attention(y, y, attention_mask=mask)
        x = x if self.is_norm_first else self.norm1(x)
        y = self.norm2(x) if self.is_norm_first else x
        x = x + self.down(self.up(y))
        return x if self.is_norm_first else self.norm2(x)


class PositionEmbedding(layers.Layer):
    """Adds an embedding of each place, and puts a class token before all, if asked for.

    `(batch, length, width)` becomes the same, or `(batch, 1 + length, width)`.
    """

    def __init__(self, has_class_token: bool = False, **kwargs: object):
        super().__init__(**kwargs)
        self.has_class_token = has_class_token

    def build(self, input_shape: tuple[int, ...]) -> None:
        """Makes the weights."""
        _, length, width = input_shape
        normal = keras.initializers.RandomNormal(stddev=0.02)
        if self.has_class_token:
            self.token = self.add_weight(name="class_token", shape=(1, 1, width), initializer=normal)
        shape = (length + self.has_class_token, width)
        self.table = self.add_weight(name="embeddings", shape=shape, initializer=normal)
        super().build(input_shape)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Adds the table to each sample."""
        if self.has_class_token:
            x = ops.concatenate([ops.tile(self.token, (ops.shape(x)[0], 1, 1)), x], axis=1)
        return x + self.table


def gelu_by_tanh(x: keras.KerasTensor) -> keras.KerasTensor:
    """Approximates GELU, as BERT does."""
    return keras.activations.gelu(x, approximate=True)


def bert(vocabulary: int, width: int) -> keras.Model:
    """Builds an encoder that classifies texts, as `keras_hub.models.BertTextClassifier` does, without dropout.

    Args:
        vocabulary: how many tokens there are.
        width: numbers a token.

    Returns:
        A model from `token_ids`, `segment_ids`, `padding_mask`, each `(batch, length)`, to logits `(batch, classes)`.
    """
    names = ("token_ids", "segment_ids", "padding_mask")
    inputs = {name: keras.Input(protocol.SHAPES["bert"], dtype="int32", name=name) for name in names}
    x = PositionEmbedding(name="positions")(layers.Embedding(vocabulary, width, name="tokens")(inputs["token_ids"]))
    x = layers.Add(name="embedding")([x, layers.Embedding(2, width, name="segments")(inputs["segment_ids"])])
    x = layers.LayerNormalization(epsilon=1e-12, name="norm")(x)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        block = EncoderBlock(False, 1e-12, gelu_by_tanh, name=f"block{number}")
        x = block(x, padding_mask=inputs["padding_mask"])
    x = layers.Dense(width, "tanh", name="pooled")(x[:, 0])
    return keras.Model(inputs, layers.Dense(protocol.NUM_CLASSES, name="logits")(x), name="bert")


def vit(width: int) -> keras.Model:
    """Builds an encoder of an image's patches, as `keras_hub.models.ViTImageClassifier` does.

    Args:
        width: numbers a patch.

    Returns:
        A model from images (0 to 255), `(batch, height, width, 3)`, to logits `(batch, classes)`.
    """
    inputs = keras.Input(protocol.SHAPES["vit"], name="image")
    x = layers.Rescaling(1.0 / 255, name="rescaling")(inputs)
    x = layers.Conv2D(width, protocol.PATCH, protocol.PATCH, name="patches")(x)
    x = layers.Reshape((-1, width), name="sequence")(x)
    x = PositionEmbedding(has_class_token=True, name="positions")(x)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        x = EncoderBlock(True, 1e-6, "gelu", name=f"block{number}")(x)
    x = layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    return keras.Model(inputs, layers.Dense(protocol.NUM_CLASSES, name="logits")(x[:, 0]), name="vit")
