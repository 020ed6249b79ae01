"""Builds small transformers as KerasHub has them, in plain Keras: BERT, ViT, and Llama with adapters.

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


def rotated(x: keras.KerasTensor) -> keras.KerasTensor:
    """Adds rotary embeddings (arXiv:2104.09864) to `(batch, length, heads, size)`, as KerasHub does."""
    _, length, _, size = x.shape
    frequencies = 1.0 / protocol.LONGEST_WAVE ** (ops.arange(0, size, 2, dtype="float32") / size)
    angles = ops.expand_dims(ops.arange(length, dtype="float32"), 1) * frequencies
    angles = ops.expand_dims(ops.concatenate([angles, angles], -1), 1)
    first, second = ops.split(x, 2, axis=-1)
    turned = ops.reshape(ops.stack((-second, first), axis=-2), ops.shape(x))
    return x * ops.cast(ops.cos(angles), x.dtype) + turned * ops.cast(ops.sin(angles), x.dtype)


class GroupedAttention(layers.Layer):
    """Attends to what is before each position, with fewer heads of keys and values than of queries (GQA)."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        """Makes the layers and their weights."""
        width, size = input_shape[-1], input_shape[-1] // protocol.NUM_HEADS
        shapes = {"query": protocol.NUM_HEADS, "key": protocol.NUM_KEY_HEADS, "value": protocol.NUM_KEY_HEADS}
        for name, heads in shapes.items():
            layer = layers.EinsumDense("blm,mnh->blnh", (None, heads, size), name=name)
            layer.build(input_shape)
            setattr(self, name, layer)
        self.output_dense = layers.EinsumDense("blnh,nhm->blm", (None, width), name="attention_output")
        self.output_dense.build((*input_shape[:-1], protocol.NUM_HEADS, size))
        super().build(input_shape)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Computes `(batch, length, width)`."""
        query, key, value = rotated(self.query(x)), rotated(self.key(x)), self.value(x)
        groups = protocol.NUM_HEADS // protocol.NUM_KEY_HEADS
        key, value = ops.repeat(key, groups, axis=2), ops.repeat(value, groups, axis=2)
        return self.output_dense(ops.dot_product_attention(query, key, value, is_causal=True))


class DecoderBlock(layers.Layer):
    """Grouped attention and SwiGLU, each behind RMS norm and with a shortcut; without biases."""

    def build(self, input_shape: tuple[int, ...]) -> None:
        """Makes the layers and their weights."""
        width = input_shape[-1]
        self.attention = GroupedAttention(name="attention")
        self.norm1 = layers.RMSNormalization(epsilon=1e-6, name="norm1")
        self.norm2 = layers.RMSNormalization(epsilon=1e-6, name="norm2")
        self.gate = layers.Dense(3 * width, use_bias=False, name="gate")
        self.up = layers.Dense(3 * width, use_bias=False, name="up")
        self.down = layers.Dense(width, use_bias=False, name="down")
        for layer in (self.attention, self.norm1, self.norm2, self.gate, self.up):
            layer.build(input_shape)
        self.down.build((*input_shape[:-1], 3 * width))
        super().build(input_shape)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Computes `(batch, length, width)`."""
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(ops.silu(self.gate(y)) * self.up(y))


def llama(vocabulary: int, width: int) -> keras.Model:
    """Builds a decoder as `keras_hub.models.LlamaCausalLM`, frozen, with adapters on queries and values.

    Args:
        vocabulary: how many tokens there are.
        width: numbers a token.

    Returns:
        A model from tokens `(batch, length)` to logits of the next ones, `(batch, length, vocabulary)`.
    """
    inputs = keras.Input(protocol.SHAPES["llama"], dtype="int32", name="token_ids")
    x = layers.Embedding(vocabulary, width, name="tokens")(inputs)
    blocks = [DecoderBlock(name=f"block{number}") for number in range(1, protocol.NUM_BLOCKS + 1)]
    for block in blocks:
        x = block(x)
    x = layers.RMSNormalization(epsilon=1e-6, name="norm")(x)
    model = keras.Model(inputs, layers.Dense(vocabulary, use_bias=False, name="logits")(x), name="llama")
    for weight in model.trainable_variables:
        weight.trainable = False
    for block in blocks:
        block.attention.query.enable_lora(protocol.LORA_RANK)
        block.attention.value.enable_lora(protocol.LORA_RANK)
    return model
