"""Loss and metrics of a batch from what each replica has of its own rows, beside those of the whole batch."""

import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from keras import losses, metrics, ops

import kerasdp
from kerasdp.data.sampling import Split
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import set_mask
from kerasdp.same.replica_context import ReplicaContext
from kerasdp.step.global_batch import Data, GlobalBatch

ROWS, REPLICAS = 11, 3  # shards of 4, 4 and 3
NUMBERS = np.random.RandomState(0)
OUTPUTS = NUMBERS.uniform(0.05, 0.95, (ROWS, 3)).astype("float32")
CLASSES = NUMBERS.randint(0, 3, ROWS)
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]
WEIGHTS = NUMBERS.uniform(0.1, 2.0, ROWS).astype("float32")
TOKENS = NUMBERS.uniform(0.05, 0.95, (ROWS, 5, 3)).astype("float32")
TOKEN_CLASSES = NUMBERS.randint(0, 3, (ROWS, 5))
TOKEN_WEIGHTS = NUMBERS.uniform(0.0, 2.0, (ROWS, 5)).astype("float32")
MASK = NUMBERS.uniform(size=(ROWS, 5)) < np.linspace(0.1, 0.9, ROWS)[:, None]  # other shares on each replica


class Identity(keras.Model):
    def call(self, x):
        return x


class LossOfPairs(Identity):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(ops.matmul(y_pred, ops.transpose(y_pred)) - ops.matmul(x, ops.transpose(x))))


class Largest(metrics.Metric):
    def __init__(self, dtype="float32"):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.cast(ops.maximum(ops.cast(self.value, "float32"), ops.max(y_pred)), self.value.dtype))

    def result(self):
        return ops.cast(self.value, "float32")


@kerasdp.per_sample
class SumOfSquares(Largest):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self.value + ops.sum(ops.square(y_pred)))


@kerasdp.per_sample
def declared(y, outputs):
    return ops.sum(ops.abs(y - outputs), axis=-1)


def per_row(y, outputs):
    return ops.sum(ops.abs(y - outputs), axis=-1)


def one_number(y, outputs):
    return ops.mean(ops.abs(y - outputs))


def deviation(y, outputs):
    return ops.std(outputs - y)


class Exchange:
    """What replicas, each in a thread, give one another."""

    def __init__(self):
        self.barrier, self.given = threading.Barrier(REPLICAS, timeout=20), {}

    def all(self, rank, tensor):
        self.given[rank] = tensor
        self.barrier.wait()
        found = [self.given[each] for each in range(REPLICAS)]
        self.barrier.wait()
        return found

    def sum(self, rank, tensor):
        return sum(self.all(rank, tensor))


def compiled(loss, kind=Identity, **arguments):
    model = kind()
    model.compile("sgd", loss, **arguments)
    return model


def tensors(data):
    return keras.tree.map_structure(lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), data)


def masked(outputs, mask):
    return outputs if mask is None else set_mask(outputs, ops.convert_to_tensor(mask))


def of_whole(model, targets, outputs, weights, mask):
    """What Keras computes; the model is built by it."""
    (y, y_pred), x = tensors((targets, outputs)), ops.convert_to_tensor(keras.tree.flatten(outputs)[0])
    y_pred = masked(y_pred, mask)
    # Copies of the weights: Keras (3.15) multiplies them by a mask in place on torch.
    loss = model.compute_loss(x, y, y_pred, copies(weights))
    model._loss_tracker.update_state(loss, sample_weight=len(x))
    logs = model.compute_metrics(x, y, y_pred, sample_weight=copies(weights))
    return float(loss), {name: np.asarray(ops.convert_to_numpy(value)) for name, value in logs.items()}


def copies(data):
    return tensors(keras.tree.map_structure(lambda leaf: None if leaf is None else leaf.copy(), data))


def of_replicas(model, targets, outputs, weights, mask, num_rows=ROWS):
    """What replicas compute together, and what they exchanged: those of the first one."""
    exchange, size = Exchange(), -(-num_rows // REPLICAS)

    def rows_of(data, rank):
        rows = np.minimum(np.arange(rank * size, (rank + 1) * size), num_rows - 1)
        return tensors(keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data))

    def run(rank):
        context = ReplicaContext(
            num_replicas=REPLICAS, num_rows=min(max(num_rows - rank * size, 0), size), rows=size,
            first_row=rank * size, total_rows=num_rows, replicas=Split(REPLICAS).replicas(num_rows),
            gather_rows=lambda rows: ops.concatenate(exchange.all(rank, rows))[:num_rows],
        )  # fmt: skip
        own = Data(rows_of(keras.tree.flatten(outputs)[0], rank), rows_of(targets, rank),
                   masked(rows_of(outputs, rank), None if mask is None else rows_of(mask, rank)),
                   rows_of(weights, rank))  # fmt: skip
        batch = GlobalBatch(
            model, context, own, num_rows, training=True, add_up=lambda number: exchange.sum(rank, number)
        )
        batch.count_metrics()
        sums = {name: exchange.sum(rank, value) for name, value in batch.sums.to_reduce.items()}
        loss = batch.store_sums(sums)
        exchange.barrier.wait()
        if rank:  # one model stands for all
            batch.update_metrics = lambda loss: batch.whole() if not batch._add_up_metrics else None
        logs = batch.update_metrics(loss)
        return float(loss), float(batch.loss), logs, batch.is_of_own_rows, batch._add_up_metrics

    with ThreadPoolExecutor(REPLICAS) as threads:
        running = [threads.submit(run, rank) for rank in range(REPLICAS)]
        for each in running:  # one that fails leaves none of the others waiting
            each.add_done_callback(lambda done: done.exception() and exchange.barrier.abort())
    failed = [each.exception() for each in running if each.exception()]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    found = [each.result() for each in running]
    losses_found = {one[0] for one in found}
    assert len(losses_found) == 1  # of all replicas
    assert np.mean([one[1] for one in found]) == pytest.approx(found[0][0], rel=1e-5, abs=1e-7)
    logs = {name: np.asarray(ops.convert_to_numpy(value)) for name, value in found[0][2].items()}
    return found[0][0], logs, found[0][3], found[0][4]


def assert_as_whole(model, targets, outputs, weights=None, mask=None, *, is_own, are_own_metrics=True):
    expected_loss, expected = of_whole(model, targets, outputs, weights, mask)
    keras.tree.map_structure(lambda metric: metric.reset_state(), model.metrics)
    loss, logs, was_own, were_own_metrics = of_replicas(model, targets, outputs, weights, mask)
    assert (was_own, were_own_metrics) == (is_own, are_own_metrics)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert logs.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


SUMS = {
    "mse": ("mse", ONE_HOT),
    "categorical": (losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), ONE_HOT),
    "sparse": (losses.SparseCategoricalCrossentropy(), CLASSES),
    "cosine": (losses.CosineSimilarity(), ONE_HOT),
    "sum": (losses.MeanSquaredError(reduction="sum"), ONE_HOT),
    "of weights": (losses.MeanSquaredError(reduction="mean_with_sample_weight"), ONE_HOT),
    "ignored class": (losses.SparseCategoricalCrossentropy(ignore_class=0), CLASSES),
    "declared": (declared, ONE_HOT),
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_rows(name, weights):
    loss, targets = SUMS[name]
    assert_as_whole(compiled(loss), targets, OUTPUTS, weights, is_own=True)


@pytest.mark.parametrize("weights", [None, WEIGHTS, TOKEN_WEIGHTS], ids=["", "weighted", "tokens weighted"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["", "masked"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("ignored", [None, 1])
def test_tokens(reduction, mask, weights, ignored):
    """Masks and weights of which each replica has other shares."""
    loss = losses.SparseCategoricalCrossentropy(reduction=reduction, ignore_class=ignored)
    if weights is WEIGHTS:
        weights = np.repeat(WEIGHTS[:, None], 5, 1)
    model = compiled(loss, metrics=["accuracy"], weighted_metrics=[metrics.SparseTopKCategoricalAccuracy(2)])
    assert_as_whole(model, TOKEN_CLASSES, TOKENS, weights, mask, is_own=True)


OTHERS = {
    "dice": (losses.Dice(), ONE_HOT),
    "along the rows": (losses.CosineSimilarity(axis=0), ONE_HOT),
    "deviation": (deviation, ONE_HOT),
    "not declared": (per_row, ONE_HOT),
    "one number": (one_number, ONE_HOT),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_loss_that_couples_rows_is_of_all_of_them(name):
    loss, targets = OTHERS[name]
    assert_as_whole(compiled(loss, metrics=["mae"]), targets, OUTPUTS, is_own=False)


def test_outputs_of_one_axis():
    """Keras takes the mean over the only axis there is: the rows."""
    for loss in ("mse", losses.CosineSimilarity()):
        model = compiled(loss, metrics=["mae"])
        assert_as_whole(model, ONE_HOT[:, 0], OUTPUTS[:, 0], is_own=False, are_own_metrics=False)


def test_a_user_defined_compute_loss_gets_all_inputs():
    assert_as_whole(compiled(None, LossOfPairs), ONE_HOT, OUTPUTS, is_own=False)


def test_several_outputs_each_with_its_loss():
    """Whose means Keras keeps, too."""
    outputs = {"a": OUTPUTS, "b": OUTPUTS[:, :1] * 3, "c": OUTPUTS}
    targets = {"a": CLASSES, "b": OUTPUTS[:, 1:2], "c": ONE_HOT}
    arguments = {
        "loss": {"a": "sparse_categorical_crossentropy", "b": losses.MeanSquaredError(reduction="sum"), "c": declared},
        "loss_weights": {"a": 0.3, "b": 2.0, "c": 1.0},
        "metrics": {"a": ["accuracy"], "b": ["mae", "r2_score"], "c": ["categorical_accuracy"]},
    }
    for weights in (None, {"a": WEIGHTS, "b": WEIGHTS * 2, "c": WEIGHTS**2}):
        assert_as_whole(compiled(**arguments), targets, outputs, weights, is_own=True)


def test_metrics_that_do_not_add_up():
    for found, is_own in ((Largest(), False), (SumOfSquares(), True), (declared, True), (one_number, False)):
        assert_as_whole(compiled("mse", metrics=["mae", found]), ONE_HOT, OUTPUTS, is_own=True, are_own_metrics=is_own)


def test_a_replica_without_rows():
    """The last batch of an epoch may have fewer rows than there are replicas."""
    model = compiled("mse", metrics=["mae"])
    few = slice(0, 4)
    expected, _ = of_whole(model, ONE_HOT[few], OUTPUTS[few], None, None)
    loss, _, was_own, _ = of_replicas(model, ONE_HOT[few], OUTPUTS[few], None, None, num_rows=4)
    assert not was_own and loss == pytest.approx(expected, rel=1e-5)


def test_what_is_exchanged(monkeypatch):
    """No outputs; and before the backward pass nothing, unless the divisor has to be found."""
    sizes = []

    def noting(exchange, rank, tensor):
        if rank == 0:
            sizes.append(int(ops.size(tensor)))
        return add(exchange, rank, tensor)

    add = Exchange.sum
    monkeypatch.setattr(Exchange, "sum", noting)
    for mask, expected in ((None, [1, 1, 1]), (MASK, [1, 1, 1, 1])):  # loss, total and count
        model = compiled(losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
        of_whole(model, TOKEN_CLASSES, TOKENS, None, mask)
        of_replicas(model, TOKEN_CLASSES, TOKENS, None, mask)
        assert sizes == expected
        sizes.clear()


def test_a_loss_declared_per_sample_that_gives_one_number():
    wrong = kerasdp.per_sample(lambda y, outputs: ops.mean(y - outputs))
    model = compiled(wrong)
    of_whole(model, ONE_HOT, OUTPUTS, None, None)
    with pytest.raises(UserError, match="declared per_sample: .* value for each of the 4 samples.*shape \\(\\)"):
        of_replicas(model, ONE_HOT, OUTPUTS, None, None)
