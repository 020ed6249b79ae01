"""Models of sound and of time series in the manner of keras.io's examples."""

from typing import Any

import numpy as np

from tests.real_code.cases import CLASSES, ROWS, Ready, case, classes


def waves(random: np.random.RandomState, length: int = 24, channels: int = 2) -> np.ndarray:
    return random.randn(ROWS, length, channels).astype("float32")


def classifier(outputs_of: Any, random: np.random.RandomState, length: int = 24, channels: int = 2) -> Ready:
    import keras

    inputs = keras.Input((length, channels))
    logits = keras.layers.Dense(CLASSES)(outputs_of(inputs))
    return Ready(model=keras.Model(inputs, logits), x=waves(random, length, channels), y=classes(random))


@case("audio")
def speech_recognition_ctc(random: np.random.RandomState) -> Ready:
    """A recurrent net over spectrograms; texts of several lengths."""
    import keras
    from keras import layers

    inputs = keras.Input((20, 8))
    x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv1D(12, 3, padding="same")(inputs)))
    x = layers.Dropout(0.3)(layers.Bidirectional(layers.GRU(8, return_sequences=True))(x))
    model = keras.Model(inputs, layers.Dense(7)(x))
    texts = random.randint(1, 7, (ROWS, 5))
    texts[np.arange(5) >= random.randint(2, 6, (ROWS, 1))] = 0
    return Ready(model=model, x=waves(random, 20, 8), y=texts.astype("int32"), loss=keras.losses.CTC())


@case("audio")
def speaker_recognition(random: np.random.RandomState) -> Ready:
    """Residual blocks of one-dimensional convolutions over the parts of a spectrum."""
    from keras import layers

    def block(x: Any, filters: int) -> Any:
        y = layers.Conv1D(filters, 3, padding="same")(
            layers.Activation("relu")(layers.Conv1D(filters, 3, padding="same")(x))
        )
        y = layers.Activation("relu")(layers.Add()([y, layers.Conv1D(filters, 1)(x)]))
        return layers.MaxPooling1D(2, 2)(y)

    return classifier(lambda x: layers.Dense(12, "relu")(layers.Flatten()(block(block(x, 6), 8))), random)


@case("audio")
def wavenet(random: np.random.RandomState) -> Ready:
    """Dilated causal convolutions with gates; the next value as one of several classes."""
    import keras
    from keras import layers

    inputs = keras.Input((24, 1))
    x, skips = layers.Conv1D(8, 2, padding="causal")(inputs), []
    for dilation in (1, 2, 4):
        gate = layers.Conv1D(8, 2, padding="causal", dilation_rate=dilation, activation="sigmoid")(x)
        value = layers.Conv1D(8, 2, padding="causal", dilation_rate=dilation, activation="tanh")(x)
        skips.append(layers.Conv1D(8, 1)(layers.Multiply()([gate, value])))
        x = layers.Add()([x, skips[-1]])
    x = layers.Conv1D(16, 1)(layers.ReLU()(layers.Add()(skips)))
    y = random.randint(0, 16, (ROWS, 24)).astype("int32")
    return Ready(model=keras.Model(inputs, x), x=waves(random, 24, 1), y=y)


@case("audio")
def spectrogram_convnet(random: np.random.RandomState) -> Ready:
    """The spectrogram is a layer of the model."""
    from keras import layers

    def outputs_of(x: Any) -> Any:
        x = layers.MelSpectrogram(fft_length=64, sequence_stride=32, num_mel_bins=8, sampling_rate=800)(
            layers.Reshape((256,))(x)
        )
        x = layers.Conv2D(6, 3, activation="relu")(layers.Reshape((8, -1, 1))(x))
        return layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))

    return classifier(outputs_of, random, 256, 1)


@case("audio")
def speech_transformer(random: np.random.RandomState) -> Ready:
    """Convolutions, then attention; letters one by one."""
    import keras
    from keras import layers

    sound, letters = keras.Input((24, 6)), keras.Input((6,), dtype="int32")
    x = layers.Conv1D(12, 5, strides=2, padding="same", activation="relu")(sound)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 6, dropout=0.1)(x, x))
    y = layers.Embedding(10, 12)(letters)
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 6, dropout=0.1)(y, y, use_causal_mask=True))
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 6)(y, x))
    model = keras.Model([sound, letters], layers.Dense(10)(layers.Dropout(0.1)(layers.Dense(12, "relu")(y))))
    ids = random.randint(1, 10, (ROWS, 7)).astype("int32")
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return Ready(
        model=model, x=[waves(random, 24, 6), ids[:, :-1]], y=np.eye(10, dtype="float32")[ids[:, 1:]], loss=loss
    )


@case("time series")
def residual_forecast(random: np.random.RandomState) -> Ready:
    """Each block explains a part of the past and adds its part of the future (N-BEATS)."""
    import keras
    from keras import layers

    inputs = keras.Input((24,))
    past, future = inputs, 0
    for _ in range(3):
        x = layers.Dense(12, "relu")(layers.Dense(12, "relu")(past))
        past, future = past - layers.Dense(24)(x), future + layers.Dense(4)(x)
    x, y = random.randn(ROWS, 24).astype("float32"), random.randn(ROWS, 4).astype("float32")
    return Ready(model=keras.Model(inputs, future), x=x, y=y, loss="mean_absolute_percentage_error")


@case("time series")
def weather_lstm(random: np.random.RandomState) -> Ready:
    import keras
    from keras import layers

    inputs = keras.Input((12, 7))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(16)(layers.Normalization(mean=0.1, variance=2.0)(inputs))))
    return Ready(model=model, x=waves(random, 12, 7), y=random.randn(ROWS, 1).astype("float32"), loss="mse")


@case("time series")
def series_convnet(random: np.random.RandomState) -> Ready:
    from keras import layers

    def outputs_of(x: Any) -> Any:
        for _ in range(3):
            x = layers.ReLU()(layers.BatchNormalization()(layers.Conv1D(8, 3, padding="same")(x)))
        return layers.GlobalAveragePooling1D()(x)

    return classifier(outputs_of, random)


@case("time series")
def series_transformer(random: np.random.RandomState) -> Ready:
    """Of six channels: with two, each layer norm gives 1 and -1, and the attention before it has no gradient."""
    from keras import layers

    def outputs_of(x: Any) -> Any:
        for _ in range(2):
            y = layers.MultiHeadAttention(2, 8, dropout=0.25)(x, x)
            x = layers.LayerNormalization(epsilon=1e-6)(layers.Dropout(0.25)(y)) + x
            y = layers.Dropout(0.25)(layers.Conv1D(4, 1, activation="relu")(x))
            x = layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(6, 1)(y)) + x
        return layers.Dropout(0.4)(layers.Dense(16, "relu")(layers.GlobalAveragePooling1D("channels_first")(x)))

    return classifier(outputs_of, random, channels=6)


@case("time series")
def anomaly_autoencoder(random: np.random.RandomState) -> Ready:
    import keras
    from keras import layers

    inputs = keras.Input((24, 1))
    x = layers.Dropout(0.2)(layers.Conv1D(8, 7, padding="same", strides=2, activation="relu")(inputs))
    x = layers.Conv1DTranspose(8, 7, padding="same", strides=2, activation="relu")(x)
    model = keras.Model(inputs, layers.Conv1DTranspose(1, 7, padding="same")(x))
    x = waves(random, 24, 1)
    return Ready(model=model, x=x, y=x, loss="mse")


@case("time series")
def time_major_rnn(random: np.random.RandomState) -> Ready:
    """Time comes first between two Permutes: dropout and dense layers see (time, rows, width)."""
    from keras import layers, ops

    class TimeFirst(layers.Layer):
        def call(self, x: Any) -> Any:
            return ops.transpose(x, (1, 0, 2))

    def outputs_of(x: Any) -> Any:
        x = TimeFirst()(layers.Dense(9)(x))
        x = TimeFirst()(layers.Dropout(0.3)(layers.Dense(9, "tanh")(x)))
        return layers.LSTM(8)(x)

    return classifier(outputs_of, random)


@case("time series")
def rnn_with_own_cell(random: np.random.RandomState) -> Ready:
    """Two kinds of cells in a stack, one of them written here, with dropout and layer norm in the cell."""
    import keras
    from keras import layers, ops

    class Cell(layers.Layer):
        def __init__(self, units: int):
            super().__init__()
            self.units = self.state_size = units
            self.norm, self.drop = layers.LayerNormalization(), layers.Dropout(0.2, seed=11)

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1] + self.units, self.units), initializer="glorot_uniform")
            self.norm.build((None, self.units))

        def call(self, x: Any, states: Any, training: bool = False) -> Any:
            joined = ops.concatenate([x, states[0]], -1)
            state = ops.tanh(self.norm(ops.matmul(joined, self.kernel)))
            return state, [state]

    def outputs_of(x: Any) -> Any:
        return keras.layers.RNN([Cell(8), keras.layers.LSTMCell(6)])(x)

    return classifier(outputs_of, random, 8)


@case("time series")
def traffic_graph_lstm(random: np.random.RandomState) -> Ready:
    """A graph convolution over roads at each time, then an LSTM for each road: roads and rows in one axis."""
    import keras
    from keras import layers, ops

    adjacency = (random.rand(5, 5) > 0.5).astype("float32")

    class Roads(layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 6), initializer="glorot_uniform")
            self.lstm, self.drop, self.dense = layers.LSTM(8), layers.Dropout(0.2), layers.Dense(3)
            self.lstm.build((None, 8, 6))
            self.dense.build((None, 8))

        def call(self, x: Any, training: bool = False) -> Any:
            x = ops.relu(ops.einsum("rs,btsc->btrc", ops.cast(adjacency, x.dtype), ops.matmul(x, self.kernel)))
            x = ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, 8, 6))
            x = self.dense(self.drop(self.lstm(x), training=training))
            return ops.transpose(ops.reshape(x, (-1, 5, 3)), (0, 2, 1))

    inputs = keras.Input((8, 5, 1))
    x, y = random.randn(ROWS, 8, 5, 1).astype("float32"), random.randn(ROWS, 3, 5).astype("float32")
    return Ready(model=keras.Model(inputs, Roads()(inputs)), x=x, y=y, loss="mse")
