"""Which losses are the mean over equal shards: each answer beside the numbers."""

import keras
import numpy as np
import pytest
from keras import losses, ops

from kerasdp.portability.loss_reduction import is_mean_over_shards

ROWS = 8
ONE_HOT = np.eye(3, dtype="float32")[[0, 1, 2, 0, 1, 1, 2, 0]]
CLASSES = ONE_HOT.argmax(1)
NUMBERS = np.random.RandomState(0).rand(ROWS, 3).astype("float32")


class LossOfPairs(keras.Model):
    def call(self, x):
        return x

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.matmul(y_pred, ops.transpose(y_pred))))


class Identity(keras.Model):
    def call(self, x):
        return x


def deviation(y, outputs):
    return ops.std(outputs - y)


MEANS = {
    "mse": (losses.MeanSquaredError(), ONE_HOT),
    "by name": ("mae", ONE_HOT),
    "categorical": (losses.CategoricalCrossentropy(from_logits=True), ONE_HOT),
    "sparse": (losses.SparseCategoricalCrossentropy(from_logits=True), CLASSES),
    "binary": (losses.BinaryCrossentropy(), ONE_HOT),
    "focal": (losses.CategoricalFocalCrossentropy(), ONE_HOT),
    "cosine": (losses.CosineSimilarity(), ONE_HOT),
    "huber": (losses.Huber(), ONE_HOT),
    "kl": (losses.KLDivergence(), ONE_HOT),
    "poisson": (losses.Poisson(), ONE_HOT),
}
OTHERS = {
    "sum": (losses.MeanSquaredError(reduction="sum"), ONE_HOT),
    "of weights": (losses.MeanSquaredError(reduction="mean_with_sample_weight"), ONE_HOT),
    "dice": (losses.Dice(), ONE_HOT),
    "tversky": (losses.Tversky(), ONE_HOT),
    "ignored class": (losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), CLASSES),
    "along the rows": (losses.CosineSimilarity(axis=0), ONE_HOT),
    "user-defined": (deviation, ONE_HOT),
}
WEIGHTS = np.arange(1, ROWS + 1, dtype="float32")


def answer_and_difference(model, targets, outputs, weights=WEIGHTS, mask=None):
    """What the kit says, and how far the mean of the shards' losses is from the loss of the whole."""

    def loss(rows):
        own = ops.convert_to_tensor(outputs[rows])
        if mask is not None:
            own._keras_mask = ops.convert_to_tensor(mask[rows])
        value = model.compute_loss(
            None, ops.convert_to_tensor(targets[rows]), own, None if weights is None else weights[rows]
        )
        return float(value), is_mean_over_shards(model, own)

    whole, answer = loss(slice(None))
    shards = [loss(slice(begin, begin + ROWS // 2)) for begin in (0, ROWS // 2)]
    assert {own for _, own in shards} == {answer}
    return answer, abs(np.mean([value for value, _ in shards]) - whole)


def compiled(loss, kind=Identity):
    model = kind()
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_shards(name):
    loss, targets = MEANS[name]
    answer, difference = answer_and_difference(compiled(loss), targets, NUMBERS)
    assert answer and difference < 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_no_mean_over_shards(name):
    loss, targets = OTHERS[name]
    weights = None if name == "along the rows" else WEIGHTS  # such a loss has no value for each row
    answer, difference = answer_and_difference(compiled(loss), targets, NUMBERS, weights)
    assert not answer and difference > 1e-3


def test_outputs_of_several_axes_and_of_one():
    images = NUMBERS[:, None, :] * np.ones((1, 4, 1), "float32")
    answer, difference = answer_and_difference(compiled("mse"), np.zeros_like(images), images, WEIGHTS[:, None])
    assert answer and difference < 1e-5
    ones = np.ones(ROWS, "float32")
    answer, difference = answer_and_difference(compiled(losses.CosineSimilarity()), ones, NUMBERS[:, 0], ones)
    assert not answer and difference > 1e-3


def test_masked_rows():
    mask = np.arange(ROWS) < 5
    answer, difference = answer_and_difference(compiled("mse"), ONE_HOT, NUMBERS, mask=mask)
    assert not answer and difference > 1e-3


def test_a_user_defined_compute_loss():
    answer, difference = answer_and_difference(compiled(None, LossOfPairs), ONE_HOT, NUMBERS)
    assert not answer and difference > 1e-3


def test_several_outputs_are_gathered():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {"a": keras.layers.Dense(1)(inputs), "b": keras.layers.Dense(1)(inputs)})
    model.compile("sgd", {"a": "mse", "b": "mse"})
    assert not is_mean_over_shards(model, model(NUMBERS))
