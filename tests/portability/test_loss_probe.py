"""What is found out about a loss by trying it: each answer, and that parts of a batch add up where it says so."""

import keras
import numpy as np
import pytest
from keras import losses, ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.models import output_losses
from kerasdp.portability.reduction import Reduction, reduction_of, shares_of, try_losses

ROWS = 12
CLASSES = np.arange(ROWS) % 4
ONE_HOT = np.eye(4, dtype="float32")[CLASSES]
OUTPUTS = np.random.RandomState(1).rand(ROWS, 4).astype("float32")


def per_row(y, outputs):
    return ops.sum(ops.abs(y - outputs) ** 1.5, axis=-1)


def per_step(y, outputs):
    return ops.abs(y - outputs)


def mean_of_rows(y, outputs):
    return ops.mean(ops.square(y - outputs))


def total(y, outputs):
    return ops.sum(ops.square(y - outputs))


def contrastive(y, outputs):
    """As CLIP: each row against all others."""
    return losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(outputs)[0]), ops.matmul(outputs, ops.transpose(outputs)), from_logits=True
    )


def batch_hard(y, outputs):
    """The farthest row of the class and the nearest of another, for each row."""
    distances = ops.sum(ops.square(outputs[:, None] - outputs[None]), -1)
    is_same = ops.equal(ops.reshape(y, (-1, 1)), ops.reshape(y, (1, -1)))
    far = ops.max(ops.where(is_same, distances, 0.0), 1)
    near = ops.min(ops.where(is_same, 1e3, distances), 1)
    return ops.maximum(far - near + 0.5, 0.0)


def log_of_differences(y, outputs):
    return ops.log(outputs[:, 0] - 2.0)


def ratio_of_sums(y, outputs):
    """Not a number for a row that is not of the first class."""
    return ops.sum(y[:, 0] * outputs[:, 0]) / ops.sum(y[:, 0])


class OwnLoss(losses.Loss):
    def call(self, y, outputs):
        return ops.mean(ops.square(y - outputs), -1)


CASES = {
    "per row": (per_row, ONE_HOT, Reduction.BY_ROWS),
    "per step": (per_step, ONE_HOT, Reduction.BY_ROWS),
    "class": (OwnLoss(), ONE_HOT, Reduction.BY_ROWS),
    "dice by rows": (losses.Dice(axis=-1), ONE_HOT, Reduction.BY_ROWS),
    "mean of rows": (mean_of_rows, ONE_HOT, Reduction.MEAN),
    "sum of rows": (total, ONE_HOT, Reduction.COUPLES),
    "contrastive": (contrastive, CLASSES, Reduction.COUPLES),
    "batch hard": (batch_hard, CLASSES, Reduction.COUPLES),
    "unique classes": (batch_hard, np.arange(ROWS), Reduction.COUPLES),
    "along rows": (losses.CosineSimilarity(axis=0), ONE_HOT, Reduction.COUPLES),
    "dice": (losses.Dice(), ONE_HOT, Reduction.COUPLES),
    "ratio of sums": (ratio_of_sums, ONE_HOT, Reduction.COUPLES),
    "not a number": (log_of_differences, ONE_HOT, Reduction.UNKNOWN),
}


def compiled(loss, targets, tried=True):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Activation("linear")(inputs))
    model.compile("sgd", loss)
    model.compute_loss(None, ops.convert_to_tensor(targets), ops.convert_to_tensor(OUTPUTS))  # builds its losses
    if tried:
        try_losses(model, targets, model.output)
    return model


def shares(model, parts=(slice(0, 6), slice(6, 12)), is_weighted=False):
    counts = [part.stop - part.start for part in parts]
    return shares_of(model, counts, is_weighted=is_weighted, instead="leave it out")


PARTS = (slice(0, 5), slice(5, 10), slice(10, ROWS))


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name):
    loss, targets, expected = CASES[name]
    model = compiled(loss, targets)
    (made,) = output_losses(model)
    assert reduction_of(made) is expected

    def value(rows):
        return float(
            model.compute_loss(None, ops.convert_to_tensor(targets[rows]), ops.convert_to_tensor(OUTPUTS[rows]))
        )

    if expected in (Reduction.BY_ROWS, Reduction.MEAN):
        total = np.dot(shares(model, PARTS), [value(part) for part in PARTS])
        assert total == pytest.approx(value(slice(None)), rel=1e-6)
    else:
        with pytest.raises(UserError, match="leave it out") as caught:
            shares(model)
        assert "\n" not in str(caught.value)
    if expected is Reduction.MEAN:
        with pytest.raises(UserError, match="expected a value for each sample"):
            shares(model, is_weighted=True)


def test_ctc():
    inputs = keras.Input((12, 6))
    model = keras.Model(inputs, keras.layers.Activation("linear")(inputs))
    model.compile("sgd", losses.CTC())
    targets, outputs = np.random.RandomState(0).randint(1, 6, (ROWS, 4)), np.ones((ROWS, 12, 6), "float32")
    model.compute_loss(None, ops.convert_to_tensor(targets), ops.convert_to_tensor(outputs))
    try_losses(model, targets, model.output)
    assert shares(model) == [0.5, 0.5]


def test_what_was_not_tried_is_refused():
    with pytest.raises(UserError, match="expected a value for each sample"):
        shares(compiled(per_row, ONE_HOT, tried=False))


def test_the_mean_of_what_is_left_is_no_sum_over_micro_batches():
    """Each has another number of samples that count."""
    model = compiled(losses.SparseCategoricalCrossentropy(ignore_class=0), CLASSES)
    with pytest.raises(UserError, match="needs the whole batch at once; leave it out"):
        shares(model)
