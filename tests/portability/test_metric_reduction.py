"""Which metrics add up over the rows of a batch: what the kit takes for known of Keras' own, tried."""

import inspect

import keras
import numpy as np
import pytest
from keras import metrics, ops

import kerasdp
from kerasdp.portability import reduction
from kerasdp.portability.reduction import adds_up, coupling_metrics, try_metrics

NUMBERS = np.random.RandomState(0)
OUTPUTS = NUMBERS.uniform(0.05, 0.95, (12, 3)).astype("float32")
CLASSES = NUMBERS.randint(0, 3, (12, 1))
ONE_HOT = np.eye(3, dtype="float32")[CLASSES[:, 0]]

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


class Identity(keras.Model):
    def call(self, x):
        return x


def model_with(metric, targets, outputs=OUTPUTS):
    model = Identity()
    model.compile("sgd", "mse", metrics=[metric])
    model.compute_metrics(None, ops.convert_to_tensor(targets), ops.convert_to_tensor(outputs))
    return model


@pytest.mark.parametrize("name", KINDS)
def test_metrics_of_keras_add_up(name):
    """Each is taken for known; the trial, which those of others get, says the same."""
    is_sparse, is_index = name.startswith("Sparse"), name in ("IoU", "MeanIoU")
    targets = CLASSES if is_sparse or is_index else ONE_HOT
    outputs = OUTPUTS.argmax(-1)[:, None].astype("float32") if is_index else OUTPUTS
    metric = getattr(metrics, name)(**OPTIONS.get(name, {}))
    model = model_with(metric, targets, outputs)
    assert adds_up(metric) and metric.variables
    sums = reduction._sums_in_trial(model, (targets, outputs, None))
    assert all(sums[id(variable)] for variable in metric.variables)


class Decaying(metrics.Metric):
    """What it adds depends on what it has."""

    def __init__(self):
        super().__init__()
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self.value * 0.9 + ops.sum(y_pred))

    def result(self):
        return self.value


class State(metrics.Metric):
    """Keeps what a function makes of what it has and of the rows."""

    def __init__(self, function, begin, dtype="float32"):
        super().__init__()
        self.function, self.value = function, self.add_variable((), keras.initializers.Constant(begin), dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.cast(self.function(self.value, y_pred), self.value.dtype))

    def result(self):
        return ops.cast(self.value, "float32")


def least(value, y):
    return ops.minimum(value, ops.min(y))


def product(value, y):
    return value * ops.prod(y)


def any_above(value, y):
    return ops.logical_or(value, ops.any(y > 0.9))


def all_below(value, y):
    return ops.logical_and(value, ops.all(y < 0.9))


def count(value, y):
    return value + ops.cast(ops.sum(ops.cast(y > 0.5, "int32")), value.dtype)


class Remembering(Decaying):
    """What it keeps is no variable."""

    def __init__(self):
        metrics.Metric.__init__(self)
        self.seen = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.append(1)

    def result(self):
        return len(self.seen)


def of_one_row(y, outputs):
    return ops.max(outputs, axis=-1)


def of_all_rows(y, outputs):
    return ops.max(outputs)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [(of_one_row, True), (of_all_rows, False), (Decaying(), False), (Remembering(), False),
     (metrics.CosineSimilarity(axis=0), False), (keras.losses.MeanSquaredError(), False),
     (State(least, 10.0), False), (State(product, 1.0), False),
     (State(any_above, False, "bool"), False), (State(all_below, True, "bool"), False),
     *((State(count, 0, dtype), True) for dtype in ("int8", "uint8", "int64", "float16", "float32", "float64"))],
)  # fmt: skip
def test_others_are_tried(metric, expected):
    model = model_with(metric, ONE_HOT)
    assert coupling_metrics(model)
    try_metrics(model, ONE_HOT, OUTPUTS, None)
    assert bool(coupling_metrics(model)) is not expected


def test_declared():
    @kerasdp.per_sample
    class Declared(Decaying):
        pass

    assert not coupling_metrics(model_with(Declared(), ONE_HOT))
    truth = State(any_above, False, "bool")
    assert coupling_metrics(model_with(kerasdp.per_sample(truth), ONE_HOT))  # of truths there is no sum
