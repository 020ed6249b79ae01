"""Trains a regression model on a table of numbers and categories.

    python recipes/tabular.py                                          # the first backend installed
    python recipes/tabular.py --backend=jax --gpus=2 --workdir=runs/table
    python recipes/tabular.py --backend=torch --workdir=runs/table --resume
    python recipes/tabular.py --csv=houses.csv --target=price

Expected of the first command: a root mean squared error of 1.1 on held-out rows, in half a minute on two CPU cores. No
model can be better than 1.0, the noise of the table. A linear model reaches 2.6.

Without --csv the table is generated: Friedman's first problem (Multivariate Adaptive Regression Splines, 1991), with a
category that shifts the target. A CSV column with only numbers is an input of numbers. Every other column is a
category, and gets an embedding.

Copy this file into your project and edit it.
"""

import csv
import os

from absl import app, flags

import kerasdp

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 256, "Samples per step, over all devices.", lower_bound=1)
flags.DEFINE_integer("epochs", 20, "Passes over the training data.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.003, "Initial learning rate. It decays to 0 along a cosine.")
flags.DEFINE_string("csv", None, "CSV file with a header line. Default: a generated table.")
flags.DEFINE_string("target", "y", "Column to predict.")
kerasdp.flags.define()  # --backend, --gpus, --precision, --workdir, --resume, and the other arguments of `launch`


def make_table():
    """Generates a table. Returns a dictionary of columns: for each name an array of 10,000 values."""
    import numpy as np

    random = np.random.default_rng(0)
    x, color = random.random((10_000, 10)), random.integers(0, 4, 10_000)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    columns = {f"x{number}": x[:, number] for number in range(10)}
    names = np.array(["red", "green", "blue", "black"])
    return columns | {
        "color": names[color],
        "y": y + np.array([0.0, 2.0, -3.0, 5.0])[color] + random.normal(size=10_000),
    }


def read_table(path):
    """Returns the columns of a CSV file, as arrays of numbers or of texts."""
    import numpy as np

    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    columns = {}
    for name, values in zip(header, zip(*rows, strict=True), strict=True):
        try:
            columns[name] = np.array(values, float)
        except ValueError:
            columns[name] = np.array(values)
    return columns


def make_data():
    """Returns training (x, y), test (x, y), and the number of different values in each column of categories."""
    import numpy as np

    columns = read_table(FLAGS.csv) if FLAGS.csv else make_table()
    if FLAGS.target not in columns:
        raise kerasdp.UserError(f"--target: expected one of {', '.join(columns)}. Received: {FLAGS.target!r}")
    y = columns.pop(FLAGS.target).astype("float32")[:, None]
    numbers = [values for values in columns.values() if values.dtype.kind == "f"]
    categories = [np.unique(values, return_inverse=True) for values in columns.values() if values.dtype.kind != "f"]
    x = {"numbers": np.stack(numbers, axis=1).astype("float32")}
    for number, (_, codes) in enumerate(categories):
        x[f"category{number}"] = codes.astype("int32")
    held_out = np.arange(len(y)) % 5 == 0
    train, test = (({name: values[rows] for name, values in x.items()}, y[rows]) for rows in (~held_out, held_out))
    return train, test, [len(values) for values, _ in categories]


def make_model(x, sizes):
    """Builds a network that normalizes the numbers and embeds the categories."""
    import keras
    from keras import layers

    numbers = keras.Input(x["numbers"].shape[1:], name="numbers")
    mean, variance = x["numbers"].mean(axis=0), x["numbers"].var(axis=0)
    parts, inputs = [layers.Normalization(mean=mean, variance=variance)(numbers)], {"numbers": numbers}
    for number, size in enumerate(sizes):
        inputs[f"category{number}"] = category = keras.Input((), dtype="int32", name=f"category{number}")
        parts.append(layers.Embedding(size, min(16, size))(category))
    hidden = layers.concatenate(parts) if sizes else parts[0]
    for _ in range(2):
        hidden = layers.Dense(128, activation="gelu")(hidden)
    return keras.Model(inputs, layers.Dense(1)(hidden))


def train(runner):
    """Trains the model, after the backend is chosen. With torch this function runs in one process for each device."""
    import keras

    (x, y), held_out, sizes = make_data()
    with runner.scope():
        model = make_model(x, sizes)
        steps = FLAGS.epochs * -(-len(y) // FLAGS.batch_size)
        rate = keras.optimizers.schedules.CosineDecay(FLAGS.learning_rate, steps)
        optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)
        model.compile(optimizer, "mse", metrics=[keras.metrics.RootMeanSquaredError()])
    model.fit(x, y, batch_size=FLAGS.batch_size, epochs=FLAGS.epochs, validation_data=held_out)
    kerasdp.export(model, os.path.join(runner.config.workdir, "model.keras"))


def main(argv):
    """Starts the training with the flags."""
    kerasdp.launch(train, **kerasdp.flags.values(argv))


if __name__ == "__main__":
    app.run(main)
