"""Trains a small GPT on the manual that comes with Python.

    python recipes/text.py                                          # the first backend installed
    python recipes/text.py --backend=jax --gpus=2 --workdir=runs/text
    python recipes/text.py --backend=torch --workdir=runs/text --resume

Expected of the first command: it predicts 0.60 of the characters in held-out text, in some minutes on two CPU cores.
Always guessing a space has an accuracy of 0.18, guessing by the previous character 0.30. The manual depends on the
version of Python (here 3.11), so another Python reaches other values. Backends and numbers of devices do not change
them.

The text is split into windows of 128 characters. So there is no padding, and the step is compiled once.

Copy this file into your project and edit it.
"""

from absl import app, flags

import kerasdp

LENGTH, WIDTH, HEADS, BLOCKS = 128, 128, 4, 2
FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 32, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("epochs", 8, "Passes over the training data.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.001, "Learning rate.")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def windows():
    """Returns training (x, y), test (x, y), and the number of different characters."""
    from pydoc_data.topics import topics

    import numpy as np

    text = "\n".join(topics.values())
    code_of = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = np.array([code_of[character] for character in text], "int32")
    num_windows = (len(codes) - 1) // LENGTH
    # The target of each character is the next one.
    x, y = (codes[first : first + num_windows * LENGTH].reshape(-1, LENGTH) for first in (0, 1))
    held_out = np.arange(num_windows) % 10 == 0
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out]), len(code_of)


def build(num_characters: int):
    """Builds a decoder. Each position attends to itself and to earlier positions."""
    import keras
    from keras import layers

    text = keras.Input((None,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(text), axis=1) - 1
    x = layers.Embedding(num_characters, WIDTH)(text) + layers.Embedding(LENGTH, WIDTH)(places)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.add([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.add([x, layers.Dropout(0.1)(layers.Dense(WIDTH)(y))])
    return keras.Model(text, layers.Dense(num_characters)(layers.LayerNormalization()(x)), name="text")


def train(runner: "kerasdp.Runner") -> None:
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""
    import keras

    training, held_out, num_characters = windows()
    with runner.scope():
        model = build(num_characters)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(FLAGS.learning_rate), loss, metrics=["accuracy"])
    model.fit(*training, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs, validation_data=held_out)


def main(argv):
    """Starts the training with the flags."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
