"""Models of text in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes, tokens

VOCABULARY, LENGTH = 50, 12


def classifier(outputs_of: Any, random: np.random.RandomState) -> Ready:
    """Of tokens, with zeros at the ends of some rows."""
    import keras

    inputs = keras.Input((LENGTH,), dtype="int32")
    logits = keras.layers.Dense(CLASSES)(outputs_of(inputs))
    return Ready(model=keras.Model(inputs, logits), x=tokens(random, LENGTH, VOCABULARY), y=classes(random))


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
    from keras import layers

    return classifier(
        lambda x: layers.LSTM(12, dropout=0.2, recurrent_dropout=0.2)(
            layers.Embedding(VOCABULARY, 8, mask_zero=True)(x)
        ),
        random,
    )


@case("text")
def bidirectional_lstm(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(x: Any) -> Any:
        x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(layers.Embedding(VOCABULARY, 8)(x))
        return layers.Dropout(0.3)(layers.Bidirectional(layers.LSTM(8))(x))

    return classifier(outputs_of, random)


@case("text")
def text_convnet(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(x: Any) -> Any:
        x = layers.SpatialDropout1D(0.3)(layers.Embedding(VOCABULARY, 12)(x))
        x = layers.Conv1D(12, 3, padding="valid", activation="relu", strides=2)(x)
        return layers.Dropout(0.5)(layers.Dense(12, "relu")(layers.GlobalMaxPooling1D()(x)))

    return classifier(outputs_of, random)


@case("text")
def text_transformer(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(x: Any) -> Any:
        return layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(transformer_block(embedded(x))))

    return classifier(outputs_of, random)


@case("text")
def transformer_with_empty_rows(random: np.random.RandomState) -> Ready:
    """Some texts hold nothing but padding."""
    from keras import layers

    ready = classifier(
        lambda x: layers.GlobalMaxPooling1D()(
            layers.MultiHeadAttention(2, 8)(*[layers.Embedding(VOCABULARY, 16, mask_zero=True)(x)] * 2)
        ),
        random,
    )
    ready.x[::4] = 0
    return ready


@case("text")
def small_gpt(random: np.random.RandomState) -> Ready:
    """The next token of each place."""
    import keras
    from keras import layers

    inputs = keras.Input((LENGTH,), dtype="int32")
    x = embedded(inputs, mask_zero=False)
    for _ in range(2):
        x = transformer_block(x, causal=True)
    model = keras.Model(inputs, layers.Dense(VOCABULARY)(x))
    ids = random.randint(1, VOCABULARY, (ROWS, LENGTH + 1)).astype("int32")
    return Ready(model=model, x=ids[:, :-1], y=ids[:, 1:])


@case("text")
def characters_lstm(random: np.random.RandomState) -> Ready:
    """The next letter, from letters as one-hot vectors; RMSprop's place is Adam's here."""
    import keras
    from keras import layers

    inputs = keras.Input((10, 20))
    model = keras.Model(inputs, layers.Dense(20, "softmax")(layers.LSTM(16)(inputs)))
    x = np.eye(20, dtype="float32")[random.randint(0, 20, (ROWS, 10))]
    y = np.eye(20, dtype="float32")[random.randint(0, 20, ROWS)]
    return Ready(model=model, x=x, y=y, loss="categorical_crossentropy")


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


@case("text")
def masked_language_model(random: np.random.RandomState) -> Ready:
    """The loss counts the places that were hidden, by sample weights of each place."""
    import keras
    from keras import layers

    inputs = keras.Input((LENGTH,), dtype="int32")
    model = keras.Model(inputs, layers.Dense(VOCABULARY, "softmax")(transformer_block(embedded(inputs))))
    y = tokens(random)
    hidden = (random.rand(ROWS, LENGTH) < 0.3) & (y > 0)
    loss = "sparse_categorical_crossentropy"
    x, weights = np.where(hidden, VOCABULARY - 1, y), hidden.astype("float32")
    return Ready(model=model, x=x, y=y, loss=loss, fit={"sample_weight": weights})


@case("text")
def switch_transformer(random: np.random.RandomState) -> Ready:
    """Each token goes to the expert that a router chooses; nothing is added to the loss."""
    from keras import layers, ops

    class Switch(layers.Layer):
        def build(self, shape: Any) -> None:
            self.router = self.add_weight(shape=(shape[-1], 3), initializer="glorot_uniform")
            self.inner = self.add_weight(shape=(3, shape[-1], 12), initializer="glorot_uniform")
            self.outer = self.add_weight(shape=(3, 12, shape[-1]), initializer="glorot_uniform")

        def call(self, x: Any) -> Any:
            gates = ops.softmax(ops.matmul(x, self.router))
            chosen = ops.one_hot(ops.argmax(gates, -1), 3, dtype=gates.dtype) * gates
            y = ops.einsum("blek,ekw->blew", ops.relu(ops.einsum("blw,ewk->blek", x, self.inner)), self.outer)
            return ops.sum(y * ops.expand_dims(chosen, -1), axis=2)

    def outputs_of(inputs: Any) -> Any:
        x = embedded(inputs, mask_zero=False)
        return layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x + layers.Dropout(0.1)(Switch()(x))))

    return classifier(outputs_of, random)


@case("text")
def fourier_net(random: np.random.RandomState) -> Ready:
    from keras import layers, ops

    class Mix(layers.Layer):
        def call(self, x: Any) -> Any:
            return ops.fft2((x, ops.zeros_like(x)))[0]

    def outputs_of(inputs: Any) -> Any:
        x = embedded(inputs, mask_zero=False)
        x = layers.LayerNormalization()(x + Mix()(x))
        x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(24, "gelu")(x)))
        return layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(x))

    return classifier(outputs_of, random)


@case("text")
def text_similarity(random: np.random.RandomState) -> Ready:
    """Two texts through one encoder; the cosine of their vectors."""
    import keras
    from keras import layers

    encoder = keras.Sequential([layers.Embedding(VOCABULARY, 12, mask_zero=True), layers.GRU(10, dropout=0.1)])
    left, right = keras.Input((LENGTH,), dtype="int32"), keras.Input((LENGTH,), dtype="int32")
    model = keras.Model([left, right], layers.Dot(1, normalize=True)([encoder(left), encoder(right)]))
    y = random.uniform(-1, 1, (ROWS, 1)).astype("float32")
    return Ready(model=model, x=[tokens(random), tokens(random)], y=y, loss="mean_squared_error")
