"""Which sample is in which batch: a function of seed and epoch alone."""

import numpy as np
import pytest

from kerasdp.data import sampling
from kerasdp.data.sampling import Order, Split, epoch_order, replica_rows, seed_of_fit

# Of seed 0, epoch 0: ten samples in batches of six.
GOLDEN = [[4, 3, 6, 8, 0, 1], [2, 7, 5, 9]]


def all_batches(order, epoch):
    return [batch.tolist() for batch in order.batches(epoch)]


def test_the_order_never_changes():
    # Golden: a run of today must be repeatable in years. NumPy promises the raw stream that the keys are from.
    order = Order(num_samples=10, batch_size=6)
    assert all_batches(order, 0) == GOLDEN
    assert all_batches(order, 1) != all_batches(order, 0)


def test_the_order_of_few_samples_never_changes():
    # Which digits are held out, and which sequences of a bucket share a batch.
    assert epoch_order(10, seed=0, epoch=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(10, seed=0, epoch=1).tolist() != epoch_order(10, seed=0, epoch=0).tolist()
    assert epoch_order(10, seed=1, epoch=0).tolist() != epoch_order(10, seed=0, epoch=0).tolist()


@pytest.mark.parametrize(("num_samples", "batch_size"), [(10, 3), (9, 3), (1, 5), (1437, 61)])
def test_every_sample_comes_once_an_epoch(num_samples, batch_size):
    order = Order(num_samples=num_samples, batch_size=batch_size, seed=3)
    batches = list(order.batches(4))
    assert len(batches) == order.num_batches == -(-num_samples // batch_size)
    assert sorted(np.concatenate(batches)) == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_without_shuffling_the_order_is_that_of_the_data():
    order = Order(num_samples=5, batch_size=2, shuffle=False)
    assert all_batches(order, 7) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("order", [
    {}, {"shuffle": False}, {"steps_per_epoch": 5}, {"steps_per_epoch": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("block", [1, 7, 4096])
def test_an_epoch_may_begin_at_any_batch(order, block, monkeypatch):
    order = Order(num_samples=22, batch_size=7, seed=1, **order)
    whole = [all_batches(order, epoch) for epoch in range(4)]
    monkeypatch.setattr(sampling, "_BLOCK", block)  # however many are computed at once
    for epoch, batches in enumerate(whole):
        for start in range(order.num_batches + 1):
            assert [batch.tolist() for batch in order.batches(epoch, start)] == batches[start:]
        assert [order.batch(epoch, number).tolist() for number in range(order.num_batches)] == batches


def test_epochs_of_a_given_length_go_on_where_the_last_one_stopped():
    whole = Order(num_samples=7, batch_size=2, seed=1)
    short = Order(num_samples=7, batch_size=2, seed=1, steps_per_epoch=3)
    in_passes = [batch.tolist() for epoch in range(3) for batch in whole.batches(epoch)]
    in_epochs = [batch.tolist() for epoch in range(4) for batch in short.batches(epoch)]
    assert in_epochs == in_passes


@pytest.mark.parametrize(
    ("num_rows", "num_replicas", "size"), [(61, 4, 16), (64, 4, 16), (34, 4, 9), (5, 4, 2), (1, 4, 1), (7, 1, 7)]
)
def test_padding_stands_at_the_end_and_divides(num_rows, num_replicas, size):
    assert replica_rows(num_rows, num_replicas) == size
    padded = Split(num_replicas).rows_of_process(num_rows)
    assert len(padded) == size * num_replicas
    assert padded[:num_rows].tolist() == list(range(num_rows))
    assert set(padded[num_rows:]) <= {num_rows - 1}


def test_each_fit_of_a_model_has_orders_of_its_own():
    seeds = [seed_of_fit(7, number) for number in range(3)]
    assert seeds == [7, 6635463128224577688, 18279110831140952437]  # never to change: runs resume with them
    first, second = (Order(num_samples=10, batch_size=6, seed=seed) for seed in seeds[:2])
    assert all_batches(first, 0) != all_batches(second, 0)
