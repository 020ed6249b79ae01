"""Tries data that a model cannot learn from: what each case is answered, and after how many steps.

python wrong_data.py BACKEND NUM_DEVICES [CASE...]
"""

import functools
import sys

import keras
import numpy as np
from starting import printed

from kerasdp.errors import RunError

X = np.random.RandomState(0).randn(24, 4).astype("float32")
Y = (np.arange(24) % 3).astype("int32")
ONE_HOT = np.eye(3, dtype="float32")[Y]
SPARSE, CATEGORICAL = "sparse_categorical_crossentropy", "categorical_crossentropy"
NAN, INF = float("nan"), float("inf")


def changed(array, sample, value):
    array = array.copy()
    array[sample] = value
    return array


def model_for(runner, loss, *, units=3, activation="softmax", inputs=(4,), kind="functional"):
    with runner.scope():
        head = keras.layers.Dense(units, activation, name="head")
        if kind == "functional":
            entry = keras.Input(inputs)
            model = keras.Model(entry, head(entry), name="m")
        elif kind == "two":
            a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
            model = keras.Model([a, b], head(keras.layers.Concatenate()([a, b])), name="m")
        elif kind == "two outputs":
            entry = keras.Input((4,))
            model = keras.Model(entry, [head(entry), keras.layers.Dense(1, name="other")(entry)], name="m")
        elif kind == "time":
            entry = keras.Input((5, 4))
            model = keras.Model(entry, head(entry), name="m")
        elif kind == "text":
            entry = keras.Input((1,), dtype="string")
            numbers = keras.layers.StringLookup(vocabulary=list("abc"), output_mode="multi_hot")(entry)
            model = keras.Model(entry, head(numbers), name="m")
        else:
            model = Own(head, name="m")
        if loss is not None:
            model.compile(keras.optimizers.SGD(0.1), loss)
    return model


class Own(keras.Model):
    def __init__(self, head, **kwargs):
        super().__init__(**kwargs)
        self.head = head

    def call(self, inputs):
        return self.head(inputs)


class Batches(keras.utils.PyDataset):
    def __init__(self, targets):
        super().__init__()
        self.targets = targets

    def __len__(self):
        return 3

    def __getitem__(self, number):
        rows = slice(8 * number, 8 * number + 8)
        return X[rows], self.targets[rows]


# Name: loss, arguments of `model_for`, x, y, arguments of `fit`.
CASES = {
    "label too large": (SPARSE, {}, X, changed(Y, 7, 3), {}),
    "label negative": (SPARSE, {}, X, changed(Y, 7, -1), {}),
    "label ignored": (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), {}, X, changed(Y, 7, -1), {}),
    "label of a fraction": (SPARSE, {}, X, changed(Y.astype("float32"), 7, 0.5), {}),
    "labels as floats": (SPARSE, {}, X, Y.astype("float32")[:, None], {}),
    "labels as text": (SPARSE, {}, X, np.array(list("abc"))[Y], {}),
    "fewer outputs": (SPARSE, {"units": 2}, X, Y, {}),
    "fewer outputs of an own model": (SPARSE, {"units": 2, "kind": "own"}, X, Y, {}),
    "fewer outputs in time": (SPARSE, {"units": 2, "kind": "time"}, np.ones((6, 5, 4)), np.full((6, 5), 2), {}),
    "one-hot under sparse": (SPARSE, {}, X, ONE_HOT, {}),
    "sparse under one-hot": (CATEGORICAL, {}, X, Y, {}),
    "shape of targets": ("mse", {}, X, ONE_HOT[:, :2], {}),
    "rank of targets": ("mse", {}, X, Y.astype("float32"), {}),
    "targets repeated": ("mse", {}, X, Y.astype("float32")[:, None], {}),
    "no targets": (SPARSE, {}, X, None, {}),
    "targets of one output": ("mse", {"kind": "two outputs"}, X, ONE_HOT, {}),
    "a target is missing": ("mse", {"kind": "two outputs"}, X, {"head": ONE_HOT, "othre": Y}, {}),
    "shape of inputs": (SPARSE, {}, X[:, :3], Y, {}),
    "text in inputs": (SPARSE, {}, X.astype("S8"), Y, {}),
    "text in lists": (SPARSE, {}, lambda: [([["a", "b"]], Y[:2])], None, {}),
    "too many inputs": (SPARSE, {}, [X, X], Y, {}),
    "too few inputs": (SPARSE, {"kind": "two"}, X, Y, {}),
    "an input is missing": (SPARSE, {"kind": "two"}, {"a": X, "c": X}, Y, {}),
    "lists": (SPARSE, {}, X.tolist(), Y.tolist(), {}),
    "other lengths": (SPARSE, {}, X, Y[:-1], {}),
    "empty": (SPARSE, {}, X[:0], Y[:0], {}),
    "nothing": (SPARSE, {}, None, None, {}),
    "an empty generator": (SPARSE, {}, iter(()), None, {}),
    "validation of another shape": (SPARSE, {}, X, Y, {"validation_data": (X[:, :2], Y)}),
    "validation with a wrong label": (SPARSE, {}, X, Y, {"validation_data": (X, changed(Y, 2, 5))}),
    "split too large": (SPARSE, {}, X, Y, {"validation_split": 0.99}),
    "NaN in inputs": (SPARSE, {}, changed(X, 5, NAN), Y, {"shuffle": False}),
    "NaN in later inputs": (SPARSE, {}, changed(X, 21, NAN), Y, {"shuffle": False}),
    "infinite inputs": ("mse", {"activation": None}, changed(X, 12, INF), ONE_HOT, {"shuffle": False}),
    "NaN in targets": ("mse", {}, X, changed(ONE_HOT, 21, NAN), {}),
    "not compiled": (None, {}, X, Y, {}),
    "weights of another shape": (SPARSE, {}, X, Y, {"sample_weight": np.ones((24, 3))}),
    "weights of another length": (SPARSE, {}, X, Y, {"sample_weight": np.ones(23)}),
    "weights that are NaN": (SPARSE, {}, X, Y, {"sample_weight": changed(np.ones(24), 3, NAN)}),
    "weight of an unknown class": (CATEGORICAL, {}, X, ONE_HOT, {"class_weight": {0: 1.0, 7: 2.0}}),
    "weight of a class without samples": (SPARSE, {}, X, Y, {"class_weight": {0: 1.0, 7: 2.0}}),
    "weight of a class by name": (SPARSE, {}, X, Y, {"class_weight": {"0": 1.0}}),
    "batch larger than the data": (SPARSE, {}, X, Y, {"batch_size": 100}),
    "a later batch": (SPARSE, {}, lambda: Batches(changed(Y, 17, 9)), None, {"shuffle": False}),
    "a learning rate too high": ("mse", {"activation": None}, X * 1e30, ONE_HOT, {"shuffle": False}),
}

if keras.backend.backend() == "tensorflow":
    CASES["text to look up"] = (SPARSE, {"kind": "text"}, np.array(list("abcd"), object)[Y][:, None], Y, {})

# Seen by the process alone that has the row, where there are several: caught there, it leaves the others waiting.
LATER = ("a later batch",)


def train(runner, names):
    return {name: answer(runner, *CASES[name]) for name in names}


def answer(runner, loss, options, x, y, arguments):
    counter = Counter()
    arguments = {"batch_size": 8} | arguments
    try:
        model = model_for(runner, loss, **options)
        runner.fit(model, x() if callable(x) else x, y, callbacks=[counter], verbose=0, **arguments)
        outcome = "trains"
    except RunError as error:
        outcome = f"{type(error).__name__}: {error}"
    except Exception as error:
        outcome = f"of Keras, or of the backend: {error!r}"
    return [outcome, counter.steps]


class Counter(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1


if __name__ == "__main__":
    backend, count, *names = sys.argv[1:]
    function = functools.partial(train, names=names or [name for name in CASES if name not in LATER or count == "1"])
    printed(function, backend, count, hang_timeout=10 if names else None)
