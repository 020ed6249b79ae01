"""Models of text in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, Ready, case, classes, tokens

VOCABULARY, LENGTH = 50, 12


def transformer_block(x: Any, width: int = 16, mask: Any = None, causal: bool = False) -> Any:
    from keras import layers

    attention = layers.MultiHeadAttention(2, width // 2, dropout=0.1)
    x = layers.LayerNormalization()(x + attention(x, x, attention_mask=mask, use_causal_mask=causal))
    y = layers.Dropout(0.1)(layers.Dense(width)(layers.Dense(24, "relu")(x)))
    return layers.LayerNormalization()(x + y)


def embedded(tokens_in: Any, width: int = 16, mask_zero: bool = True) -> Any:
    """Tokens and their places."""
    from keras import layers, ops

    class Places(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.supports_masking = True
            self.table = layers.Embedding(LENGTH, width)

        def call(self, x: Any) -> Any:
            return x + self.table(ops.arange(LENGTH))

    return Places()(layers.Embedding(VOCABULARY, width, mask_zero=mask_zero)(tokens_in))


@case("text")
def masked_lstm(random: np.random.RandomState) -> Ready:
    """Zeros are at the ends of some rows."""
    import keras
    from keras import layers

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.LSTM(12, dropout=0.2, recurrent_dropout=0.2)(layers.Embedding(VOCABULARY, 8, mask_zero=True)(inputs))
    return Ready(model=keras.Model(inputs, layers.Dense(CLASSES)(x)), x=tokens(random), y=classes(random))


@case("text")
def translation_lstm(random: np.random.RandomState) -> Ready:
    """Encoder and decoder; the decoder begins with the encoder's state."""
    import keras
    from keras import layers

    sources, targets = keras.Input((None,), dtype="int32"), keras.Input((None,), dtype="int32")
    _, *state = layers.LSTM(12, return_state=True)(layers.Embedding(VOCABULARY, 8, mask_zero=True)(sources))
    x = layers.Embedding(VOCABULARY, 8, mask_zero=True)(targets)
    x = layers.LSTM(12, return_sequences=True)(x, initial_state=state)
    model = keras.Model([sources, targets], layers.Dense(VOCABULARY)(x))
    x = [tokens(random, 8), tokens(random, 9)]
    weights = (x[1] != 0).astype("float32")
    return Ready(model=model, x=x, y=tokens(random, 9), fit={"sample_weight": weights})


@case("text")
def translation_transformer(random: np.random.RandomState) -> Ready:
    """Attention across, with a mask made of both texts' padding; the loss leaves padding out."""
    import keras
    from keras import layers

    sources, targets = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
    memory = transformer_block(embedded(sources))
    x = transformer_block(embedded(targets), causal=True)
    across = layers.MultiHeadAttention(2, 8)(x, memory)
    x = layers.LayerNormalization()(x + across)
    model = keras.Model([sources, targets], layers.Dense(VOCABULARY)(layers.Dropout(0.3)(x)))
    model_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    return Ready(model=model, x=[tokens(random), tokens(random)], y=tokens(random), loss=model_loss)


@case("text")
def named_entities(random: np.random.RandomState) -> Ready:
    """A class for each token; a loss of its own that leaves padding out."""
    import keras
    from keras import layers, ops

    def loss(y_true: Any, y_pred: Any) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        mask = ops.cast(y_true > 0, each.dtype)
        return ops.sum(each * mask, -1) / ops.maximum(ops.sum(mask, -1), 1)

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Dropout(0.1)(transformer_block(embedded(inputs, mask_zero=False)))
    model = keras.Model(inputs, layers.Dense(5)(layers.Dropout(0.1)(layers.Dense(12, "relu")(x))))
    x = tokens(random)
    return Ready(model=model, x=x, y=((x % 4 + 1) * (x > 0)).astype("int32"), loss=loss)
