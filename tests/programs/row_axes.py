"""Trains models whose layers see other rows than those of the batch, and prints the losses of each as a line of JSON.

python row_axes.py BACKEND NUM_DEVICES NAME ...
"""

import sys

import keras
import numpy as np
from keras import layers, ops
from starting import printed

import kerasdp

# Samples of an uneven batch: the last device has padding.
ROWS = 9


class Table(layers.Layer):
    """Adds a table that has as many rows as a replica, dropped by itself."""

    def build(self, shape):
        self.table = self.add_weight(shape=(5, shape[-1]))
        self.dropout = layers.Dropout(0.5)

    def call(self, x, training=False):
        return x + ops.mean(self.dropout(self.table, training=training), axis=0)


class Views(layers.Layer):
    """Doubles the batch, as contrastive learning does, drops, and takes the mean of both halves."""

    def __init__(self):
        super().__init__()
        self.dropout, self.norm = layers.Dropout(0.5), layers.BatchNormalization()

    def call(self, x, training=False):
        x = self.norm(self.dropout(ops.concatenate([x, 2 * x], axis=0), training=training), training=training)
        return ops.sum(ops.reshape(x, (2, -1, *x.shape[1:])), axis=0)


class Elsewhere(layers.Layer):
    """Normalizes, drops and adds noise behind `fold`, which `unfold` undoes."""

    def __init__(self):
        super().__init__()
        self.dropout, self.norm = layers.Dropout(0.5), layers.BatchNormalization()
        self.noise = layers.GaussianNoise(0.3)

    def call(self, x, training=False):
        x = self.dropout(self.noise(self.fold(x), training=training), training=training)
        return self.unfold(self.norm(x, training=training))


class Windows(Elsewhere):
    """Folds four windows of each sample into axis 0, as a Swin transformer."""

    def fold(self, x):
        return ops.reshape(x, (-1, 2, *x.shape[2:]))

    def unfold(self, x):
        return ops.reshape(x, (-1, 8, *x.shape[2:]))


class TimeFirst(Elsewhere):
    """Puts time first, as XLNet."""

    def fold(self, x):
        return ops.swapaxes(x, 0, 1)

    unfold = fold


class Noise(layers.Layer):
    """Draws without a seed generator."""

    def __init__(self, seed, **kwargs):
        super().__init__(**kwargs)
        self.seed = seed

    def call(self, x, training=False):
        return x + 0.3 * keras.random.normal(ops.shape(x), seed=self.seed) if training else x


class HiddenNoise(Noise):
    """Draws by a function that its text does not name."""

    def call(self, x, training=False):
        return x + getattr(keras.random, "normal")(ops.shape(x)) if training else x  # noqa: B009


class Mask(layers.Layer):
    """The same for all rows, by NumPy's generator: past Keras."""

    def call(self, x):
        return x * ops.convert_to_tensor((np.random.rand(8, 6) > 0.3).astype("float32"))


class Mix(layers.Layer):
    """Takes the mean of the batch off each sample."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Ragged(keras.Model):
    """Lays the positive steps of all samples one after the other, and adds them up by sample."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = layers.Dense(6, name="inner"), layers.Dense(3)
        self.lay, self.total = layers.Lambda(self.laid, name="lay"), layers.Lambda(self.summed, name="total")

    @staticmethod
    def laid(x):
        (places,) = ops.nonzero(ops.reshape(x[..., 0] > 0, (-1,)))
        return ops.take(ops.reshape(x, (-1, x.shape[-1])), places, axis=0), places // x.shape[1]

    @staticmethod
    def summed(given):
        steps, samples, x = given
        return ops.segment_sum(steps, ops.cast(samples, "int32"), num_segments=x.shape[0])

    def build(self, shape):
        self.inner.build((None, 6))
        self.last.build((None, 6))

    def call(self, x):
        steps, samples = self.lay(x)
        return self.last(self.total([ops.tanh(self.inner(steps)), samples, x]))


def threes(x):
    """Takes the mean of each three samples off them: nine can be cut so, four cannot."""
    groups = ops.reshape(x, (3, -1, *x.shape[1:])) if x.shape[0] in (None, ROWS) else ops.split(x, 3)
    return ops.reshape(ops.stack(list(groups)), (-1, *x.shape[1:]))


def mix_of_operations():
    """As `Mix`, without a layer that could be called with all rows."""
    inputs = keras.Input((8, 6))
    hidden = layers.Dense(6)(inputs)
    hidden = hidden - ops.mean(hidden, axis=0, keepdims=True)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)), name="mixes")


def sequential(*between, name=None):
    first, last = (keras.Input((8, 6)), layers.Dense(6)), (layers.Flatten(), layers.Dense(3))
    return keras.Sequential([*first, *between, *last], name=name)


def steps_of_time():
    """Batch norm within TimeDistributed."""
    return sequential(layers.TimeDistributed(layers.BatchNormalization()), layers.TimeDistributed(layers.Dropout(0.5)))


class TimeFirstOutputs(keras.Model):
    """Gives its outputs with time first."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return ops.swapaxes(self.dense(x), 0, 1)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, ops.mean(y_pred, axis=0), sample_weight, training=training)


MODELS = {
    "table": lambda: sequential(Table()),
    "views": lambda: sequential(Views()),
    "windows": lambda: sequential(Windows()),
    "time first": lambda: sequential(TimeFirst()),
    "time distributed": steps_of_time,
    "activity": lambda: sequential(
        Windows(), layers.Permute((2, 1)), layers.ActivityRegularization(l2=0.1), layers.Activation("tanh")
    ),
    "time first outputs": TimeFirstOutputs,
    "noise of a fixed seed": lambda: sequential(Noise(1337)),
    "noise without a seed": lambda: sequential(Noise(None)),
    "hidden noise without a seed": lambda: sequential(HiddenNoise(None)),
    "mix": lambda: sequential(Mix(name="mix"), layers.Dropout(0.5), Mix(name="again"), name="mixes"),
    "mix of operations": mix_of_operations,
    "draws past Keras": lambda: sequential(Mask(name="mask"), name="draws"),
    "ragged": Ragged,
    "threes": lambda: sequential(layers.Lambda(threes, output_shape=(8, 6), name="threes"), name="thirds"),
}


def train(runner):
    results = train_all(runner, sys.argv[3:])
    untrained = ("mix", "time first", "mix of operations") if "mix" in results else ()
    return results | {"predictions": {name: predicted(runner, name) for name in untrained}}


def predicted(runner, name):
    """What a model that was never trained predicts."""
    x = np.random.RandomState(0).randn(2 * ROWS, 8, 6).astype("float32")
    with runner.scope():
        model = MODELS[name]()
    try:
        return runner.predict(model, x, batch_size=ROWS).tolist()
    except kerasdp.UserError as error:
        return str(error)


def train_all(runner, names):
    from learn_classes import fitted

    random = np.random.RandomState(0)
    x, y = random.randn(2 * ROWS, 8, 6).astype("float32"), random.randint(0, 3, 2 * ROWS)
    results = {}
    for name in names:
        if name == "ragged" and keras.backend.backend() == "jax":  # whose programs know all sizes beforehand
            continue
        if name == "threes" and keras.backend.backend() == "tensorflow":  # Keras cannot build it there
            continue
        with runner.scope():
            model = MODELS[name]()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        try:
            results[name], _ = fitted(runner, model, x, y, batch_size=ROWS, epochs=2)
        except kerasdp.UserError as error:
            results[name] = str(error)
    return results


if __name__ == "__main__":
    printed(train, *sys.argv[1:3])
