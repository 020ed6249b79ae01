"""Builds small forms of models that are no transformers, in plain Keras: an LSTM tagger."""

import keras
import protocol
from keras import layers


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
