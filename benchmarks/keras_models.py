"""Builds the models that kerasdp does not have, in plain Keras: here two with outputs as large as a batch makes them.

A small GPT, and a segmentation net. The others are in keras_transformers.py and keras_nets.py. The hand-written loops
train the same: torch_models.py, torch_transformers.py and torch_nets.py, and loop_models.py.
"""

from argparse import Namespace
from typing import Any

import keras
import keras_nets
import keras_transformers
import protocol
from keras import layers, ops


class TokenAndPositionEmbedding(layers.Layer):
    """Adds an embedding of each token and one of its place; `(batch, length)` becomes `(batch, length, width)`."""

    def __init__(self, vocabulary: int, length: int, width: int, **kwargs: object):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(vocabulary, width, name="tokens")
        self.positions = layers.Embedding(length, width, name="positions")

    def build(self, input_shape: tuple[int, ...]) -> None:
        """Makes the weights."""
        self.tokens.build(input_shape)
        self.positions.build(input_shape[1:])
        super().build(input_shape)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """Looks both up."""
        return self.tokens(x) + self.positions(ops.arange(x.shape[1]))


def gpt(vocabulary: int, width: int) -> keras.Model:
    """Builds a transformer for tokens, pre-norm as in GPT-2 (Radford et al. 2019), embeddings not tied.

    Args:
        vocabulary: how many tokens there are.
        width: numbers a token.

    Returns:
        A model from tokens `(batch, length)` to logits of the next ones, `(batch, length, vocabulary)`.
    """
    inputs = keras.Input(protocol.SHAPES["gpt"], dtype="int32", name="tokens")
    x = TokenAndPositionEmbedding(vocabulary, inputs.shape[1], width, name="embedding")(inputs)
    for number in range(1, protocol.NUM_BLOCKS + 1):
        name = f"block{number}"
        y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm1")(x)
        attention = layers.MultiHeadAttention(protocol.NUM_HEADS, width // protocol.NUM_HEADS, name=f"{name}_attention")
        x = layers.Add(name=f"{name}_add1")([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(epsilon=1e-5, name=f"{name}_norm2")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"{name}_up")(y)
        x = layers.Add(name=f"{name}_add2")([x, layers.Dense(width, name=f"{name}_down")(y)])
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    return keras.Model(inputs, layers.Dense(vocabulary, name="logits")(x), name="gpt")


def segmentation(width: int) -> keras.Model:
    """Builds three convolutions that halve an image, and three that double it by what they say of 2x2 pixels each.

    As Wang et al. 2018, "Understanding Convolution for Semantic Segmentation"; with shortcuts.

    Args:
        width: filters of the first convolution.

    Returns:
        A model from images (0 to 255), `(batch, height, width, 3)`, to logits, `(batch, height, width, classes)`.
    """

    def halve(name: str, x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
        x = layers.Conv2D(filters, 4, 2, "same", use_bias=False, name=name)(x)
        return layers.ReLU(name=f"{name}_relu")(layers.BatchNormalization(name=f"{name}_norm")(x))

    def double(name: str, x: keras.KerasTensor, filters: int, bias: bool = False) -> keras.KerasTensor:
        x = layers.Conv2D(4 * filters, 1, use_bias=bias, name=name)(x)
        _, rows, columns, _ = x.shape
        x = layers.Reshape((rows, columns, 2, 2, filters), name=f"{name}_blocks")(x)
        x = layers.Permute((1, 3, 2, 4, 5), name=f"{name}_order")(x)
        return layers.Reshape((2 * rows, 2 * columns, filters), name=f"{name}_image")(x)

    def join(name: str, x: keras.KerasTensor, other: keras.KerasTensor) -> keras.KerasTensor:
        x = double(name, x, other.shape[-1])
        x = layers.BatchNormalization(name=f"{name}_norm")(x)
        return layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_add")([x, other]))

    inputs = keras.Input(protocol.SHAPES["segmentation"], name="image")
    half = halve("down1", layers.Rescaling(1.0 / 255, name="rescaling")(inputs), width)
    quarter = halve("down2", half, 2 * width)
    x = halve("down3", quarter, 4 * width)
    x = join("up2", join("up1", x, quarter), half)
    logits = double("logits", x, protocol.SEGMENTATION_CLASSES, bias=True)
    return keras.Model(inputs, logits, name="segmentation")


def make_model(args: Namespace) -> keras.Model:
    """Builds the model `args.model`."""
    if args.model in protocol.TEXTS:
        models = {
            "gpt": gpt, "bert": keras_transformers.bert, "llama": keras_transformers.llama, "tagger": keras_nets.tagger,
        }  # fmt: skip
        return models[args.model](args.vocabulary, args.width)
    models = {
        "segmentation": segmentation, "vit": keras_transformers.vit, "unet": keras_nets.unet,
        "efficientnet": keras_nets.efficientnet,
    }  # fmt: skip
    return models[args.model](args.width)


def make_loss(args: Namespace) -> dict[str, Any]:
    """Returns the arguments of `compile` for loss and metrics."""
    if args.model == "unet":
        return {"loss": keras.losses.MeanSquaredError()}
    return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}
