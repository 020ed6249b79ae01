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
