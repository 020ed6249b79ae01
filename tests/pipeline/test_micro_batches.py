"""How a batch is cut: no row is lost, the shares of a loss add up to it, and the size follows that of the batch."""

import keras
import numpy as np
import pytest
from keras import layers

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.pipeline import MicroBatches, make_plan, with_rows
from tests.pipeline.models import net


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 61, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 61, 100])
def test_each_row_is_in_one_micro_batch(num_rows, size):
    cut = MicroBatches(num_rows=num_rows, size=size)
    parts = [np.arange(num_rows)[cut.rows(number)] for number in range(len(cut))]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(num_rows))
    sizes = [cut.num_rows_of(number) for number in range(len(cut))]
    assert sizes == [len(part) for part in parts]
    assert set(sizes[:-1]) <= {size} and 0 < sizes[-1] <= size


def with_loss(loss):
    model = net()
    model.compile("sgd", loss)
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 4)))
    return model


def two_outputs(**losses):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, {name: layers.Dense(4, name=name)(inputs) for name in ("kind", "size")})
    model.compile("sgd", losses)
    model.train_on_batch(np.ones((4, 3)), {"kind": np.ones((4, 4)), "size": np.ones((4, 4))})
    return model


UNEVEN = MicroBatches(num_rows=10, size=4)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: with_loss("mse"),
        lambda: with_loss(keras.losses.MeanAbsoluteError(reduction="mean")),
        lambda: two_outputs(kind="mse", size="mae"),
        lambda: two_outputs(kind="mse", size=keras.losses.MeanAbsoluteError(reduction="mean")),
    ],
)
def test_means_count_by_rows(make, is_weighted):
    shares = UNEVEN.shares(make(), is_weighted=is_weighted)
    assert shares == pytest.approx([0.4, 0.4, 0.2])
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_the_shares_add_up_to_the_loss(reduction):
    """What they are for, with numbers."""
    rows = np.random.RandomState(0)
    targets, outputs = rows.rand(10, 4), rows.rand(10, 4)
    model = with_loss(keras.losses.MeanSquaredError(reduction=reduction))
    parts = [UNEVEN.rows(number) for number in range(3)]
    losses = [float(model.loss(targets[part], outputs[part])) for part in parts]
    shares = UNEVEN.shares(model, is_weighted=False)
    assert np.dot(shares, losses) == pytest.approx(float(model.loss(targets, outputs)))


def loss_of(reduction):
    return keras.losses.MeanSquaredError(reduction=reduction)


@pytest.mark.parametrize(
    ("make", "is_weighted", "words"),
    [
        (
            lambda: with_loss(loss_of("mean_with_sample_weight")),
            True,
            "reduced by mean_with_sample_weight, which needs",
        ),
        (lambda: two_outputs(kind="mse", size=loss_of("sum")), False, "reduced by sum, sum_over_batch_size"),
        (lambda: with_loss("dice"), False, "the loss dice of"),
        (lambda: with_loss(keras.losses.Tversky()), False, "the loss tversky of"),
    ],
)
def test_a_loss_that_needs_the_whole_batch(make, is_weighted, words):
    with pytest.raises(UserError, match=f"{words}.*; use --strategy=data, or --split_size=10, with which the stages"):
        UNEVEN.shares(make(), is_weighted=is_weighted)
    assert MicroBatches(num_rows=10, size=10).shares(make(), is_weighted=is_weighted) == [1.0]


def tuned(num_rows, **choices):
    """Returns the plan of a run with a `config.batch_size` of 64 after `fit` was given batches of `num_rows`."""
    config = Config(strategy="pipeline", batch_size=64, **choices)
    return with_rows(make_plan(net(), config, 2), config, num_rows)


@pytest.mark.parametrize(("num_rows", "size"), [(16, 4), (61, 16), (64, 16), (256, 64)])
def test_as_many_micro_batches_in_batches_of_any_size(num_rows, size):
    made = tuned(num_rows)
    assert (made.size, len(made.micro_batches(num_rows))) == (size, 4)


def test_batches_that_cannot_be_cut_as_asked():
    with pytest.raises(UserError, match="--split_size: expected at most 8, a pipeline's samples. Received: 16"):
        tuned(8, split_size=16)
