"""Which losses and metrics are sums over the rows of a batch: Keras' own, and those that are declared."""

import inspect

import numpy as np
import pytest
from keras import losses, metrics, ops

import kerasdp
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import output_losses
from kerasdp.step.global_batch import BY_ROWS, adds_up, is_by_rows, shares_of
from tests.step import test_global_batch
from tests.step.test_global_batch import NUMBERS, ONE_HOT, OUTPUTS, ROWS, Identity, Largest, declared, per_row

CLASSES = test_global_batch.CLASSES[:, None]
PARTS = (slice(0, 5), slice(5, 6), slice(6, ROWS))


def model_with(loss="mse", targets=ONE_HOT, outputs=OUTPUTS, **arguments):
    """A compiled model whose losses and metrics are built."""
    model = Identity()
    model.compile("sgd", loss, **arguments)
    model.compute_loss(None, ops.convert_to_tensor(targets), ops.convert_to_tensor(outputs))
    model.compute_metrics(None, ops.convert_to_tensor(targets), ops.convert_to_tensor(outputs))
    return model


def shares(model, is_weighted=False):
    counts = [part.stop - part.start for part in PARTS]
    return shares_of(model, counts, is_weighted=is_weighted, instead="leave it out")


@pytest.mark.parametrize("function", sorted(BY_ROWS, key=lambda function: function.__name__))
def test_losses_of_keras_are_by_rows(function):
    """Each is known to give values of each row alone."""
    targets, outputs = CLASSES if "sparse" in function.__name__ else ONE_HOT, OUTPUTS
    if function is losses.ctc:
        targets, outputs = NUMBERS.randint(1, 6, (ROWS, 4)), NUMBERS.rand(ROWS, 12, 6).astype("float32")

    def values(rows):
        return ops.convert_to_numpy(
            function(ops.convert_to_tensor(targets[rows]), ops.convert_to_tensor(outputs[rows]))
        )

    whole = values(slice(None))
    assert len(whole) == ROWS
    np.testing.assert_allclose(np.concatenate([values(part) for part in PARTS]), whole, rtol=1e-5, atol=1e-6)


def masked_mean(y, outputs):
    """A number for each row, which depends on how many rows count."""
    counts = ops.cast(y[:, 0] > 0, outputs.dtype)
    return ops.square(y[:, 0] - outputs[:, 0]) * counts / ops.sum(counts)


class OfPairs(losses.Loss):
    def call(self, y, outputs):
        return ops.mean(ops.matmul(outputs, ops.transpose(outputs)), -1)


@kerasdp.per_sample
class Declared(losses.Loss):
    def call(self, y, outputs):
        return per_row(y, outputs)


LOSSES = {
    "of Keras": ("categorical_crossentropy", True),
    "ctc": (losses.CTC(), True),
    "sum": (losses.MeanSquaredError(reduction="sum"), True),
    "without weights": (losses.MeanSquaredError(reduction="mean_with_sample_weight"), True),
    "declared function": (declared, True),
    "declared class": (Declared(), True),
    "not declared": (per_row, False),
    "mean of rows": (lambda y, outputs: ops.mean(ops.square(y - outputs)), False),
    "masked mean": (masked_mean, False),
    "pairs": (OfPairs(), False),
    "along the rows": (losses.CosineSimilarity(axis=0), False),
    "dice": (losses.Dice(), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_known_of_losses(name):
    """A part of the batch each adds up where a loss is known to be by rows; else micro-batches are refused."""
    loss, expected = LOSSES[name]
    ctc = (NUMBERS.randint(1, 6, (ROWS, 4)), np.ones((ROWS, 12, 6), "float32"))
    targets, outputs = ctc if name == "ctc" else (ONE_HOT, OUTPUTS)
    model = model_with(loss, targets, outputs)
    (made,) = output_losses(model)
    assert is_by_rows(made) is expected

    def value(rows):
        return float(model.compute_loss(None, *map(ops.convert_to_tensor, (targets[rows], outputs[rows]))))

    if expected:
        assert np.dot(shares(model), [value(part) for part in PARTS]) == pytest.approx(value(slice(None)), rel=1e-6)
        return
    with pytest.raises(UserError, match="needs the whole batch at once; leave it out. Or .*per_sample, if each "):
        shares(model)


@pytest.mark.parametrize(
    ("loss", "is_weighted", "words"),
    [
        (losses.SparseCategoricalCrossentropy(ignore_class=0), False, "the loss sparse_categorical_crossentropy of"),
        (losses.MeanSquaredError(reduction="mean_with_sample_weight"), True, "the reduction mean_with_sample_weight"),
    ],
)
def test_the_mean_of_what_counts_is_no_sum_over_micro_batches(loss, is_weighted, words):
    """Each has another number of samples that count, or other weights."""
    with pytest.raises(UserError, match=f"{words}.* needs the whole batch at once; leave it out"):
        shares(model_with(loss, CLASSES), is_weighted)


OPTIONS = {
    "IoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": 3},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}
# Bases, and what is no metric of targets and outputs.
OTHERS = {"Metric", "Mean", "Sum", "MeanMetricWrapper"}
KINDS = sorted(
    name for name, kind in vars(metrics).items()
    if inspect.isclass(kind) and issubclass(kind, metrics.Metric) and name not in OTHERS
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_metrics_of_keras_add_up(name):
    """Each is known to: updated with parts of the batch, their variables change by as much as with all of it."""
    is_sparse, is_index = name.startswith("Sparse"), name in ("IoU", "MeanIoU")
    targets = CLASSES if is_sparse or is_index else ONE_HOT
    outputs = OUTPUTS.argmax(-1)[:, None].astype("float32") if is_index else OUTPUTS
    metric = getattr(metrics, name)(**OPTIONS.get(name, {}))
    model_with(targets=targets, outputs=outputs, metrics=[metric])
    assert adds_up(metric) and metric.variables

    def changes(rows, begin=0.0):
        for variable in metric.variables:
            variable.assign(ops.full(variable.shape, begin, variable.dtype))
        metric.update_state(*map(ops.convert_to_tensor, (targets[rows], outputs[rows])))
        return [ops.convert_to_numpy(variable.value).astype("float64") - begin for variable in metric.variables]

    whole, *parts = (changes(rows) for rows in (slice(None), *PARTS))
    for expected, *received in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(sum(received), expected, atol=1e-5 * max(np.abs(expected).max(initial=0), 1))
    for expected, received in zip(whole, changes(slice(None), 97.0), strict=True):  # 0 may stay 0
        np.testing.assert_allclose(received, expected, atol=1e-4 * max(np.abs(expected).max(initial=0), 1))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [(Largest(), False), (per_row, False), (metrics.CosineSimilarity(axis=0), False),
     (losses.MeanSquaredError(), False), (declared, True), (kerasdp.per_sample(type("Own", (Largest,), {}))(), True),
     (kerasdp.per_sample(type("Truth", (Largest,), {}))("bool"), False)],
    ids=["user-defined", "function", "along the rows", "a loss", "declared", "declared class", "truths"],
)  # fmt: skip
def test_what_is_known_of_metrics(metric, expected):
    """Of truths there is no sum, whatever is declared."""
    found = model_with(metrics=[metric])._compile_metrics.metrics[-1]
    assert adds_up(found) is expected
