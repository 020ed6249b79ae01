"""Batches as each process sees them."""

import threading
import time

import keras
import numpy as np
import pytest

from kerasdp.data.batch import Feed, SampleReader
from kerasdp.data.batch_reader import IndexedReader
from kerasdp.data.sampling import Order, Split
from kerasdp.data.sources import ArraySource
from kerasdp.run_state import Position, RunState

X, Y = np.arange(22).reshape(11, 2), np.arange(11)


class Threes(keras.utils.PyDataset):
    """Four batches: three of three rows, and one of two."""

    def __init__(self):
        super().__init__()
        self.rows = np.arange(11)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = self.rows[3 * index : 3 * index + 3]
        return X[rows], Y[rows]


def read(part, num_replicas=4, **order):
    batches = Order(num_samples=11, batch_size=6, **order)
    reader = SampleReader(ArraySource({"a": X}, Y), batches, Split(num_replicas, part))
    return [batch() for batch in reader.epoch(0)]


def test_the_parts_of_all_processes_make_the_batch():
    whole = read((0, 1))
    parts = [read((rank, 4)) for rank in range(4)]
    assert [len(batch.indices) for batch in whole] == [6, 5]
    for number, batch in enumerate(whole):
        joined = np.concatenate([part[number].inputs["a"] for part in parts])
        np.testing.assert_array_equal(joined, batch.inputs["a"])
        np.testing.assert_array_equal(batch.inputs["a"][: len(batch.indices)], X[batch.indices])
        assert len(joined) == 8
        targets = np.concatenate([part[number].targets for part in parts])
        np.testing.assert_array_equal(targets, Y[np.concatenate([part[number].own_indices for part in parts])])
        np.testing.assert_array_equal(targets[: len(batch.indices)], Y[batch.indices])


def test_indexed_batches_are_shuffled_by_seed_and_epoch():
    def epoch(seed, number):
        reader = IndexedReader(Threes(), Split(2), order_seed=seed)
        return [batch.targets[: len(batch.indices)].tolist() for batch in (read() for read in reader.epoch(number))]

    assert epoch(None, 0) == epoch(None, 1) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert epoch(5, 0) == epoch(5, 0) != epoch(5, 1)
    assert sorted(epoch(5, 1)) == sorted(epoch(None, 0))


def test_a_batch_is_read_once_however_many_look_at_it():
    """A data set that draws random numbers gives another one each time; one may shuffle when an epoch begins."""

    class Drawing(Threes):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __getitem__(self, index):
            self.calls.append(index)
            return X[:3], np.full(3, len(self.calls))

        def on_epoch_begin(self):
            self.calls.append("begin")

    data = Drawing()
    reader = IndexedReader(data, Split(1))
    first, (_, sample, _) = reader.first(), reader.sample(5)
    assert first.targets.tolist() == [2, 2, 2]
    assert sample.tolist() == [2] * 5
    epochs = [[read().targets[0] for read in reader.epoch(0)]]
    reader.end_epoch(4)
    epochs.append([read().targets[0] for read in reader.epoch(1)])
    assert data.calls == ["begin", 0, 1, 2, 3, "begin", 0, 1, 2, 3]
    assert epochs == [[2, 3, 4, 5], [7, 8, 9, 10]]


class SlowSource(ArraySource):
    num_threads = 4

    def __init__(self):
        super().__init__(np.arange(40), np.arange(40))
        self.threads = set()

    def inputs(self, indices):
        self.threads.add(threading.get_ident())
        time.sleep(0.02 if indices[0] % 2 else 0.001)  # so that later batches are ready earlier
        return super().inputs(indices)


def test_reading_ahead_in_threads_keeps_the_order():
    source = SlowSource()
    order = Order(num_samples=40, batch_size=2, shuffle=False)
    feed = Feed(SampleReader(source, order, Split(1)), lambda batch: batch.inputs.tolist())
    assert sum(feed, []) == list(range(40))
    assert len(source.threads) > 1


def test_an_epoch_that_is_left_early_stops_reading():
    feed = Feed(SampleReader(SlowSource(), Order(num_samples=40, batch_size=2), Split(1)), lambda batch: batch)
    before = threading.active_count()
    iterator = iter(feed)
    next(iterator)
    iterator.close()
    assert threading.active_count() == before


def test_an_error_in_a_reading_thread_reaches_the_training():
    class Broken(SlowSource):
        def inputs(self, indices):
            raise OSError("the disk is gone")

    feed = Feed(SampleReader(Broken(), Order(num_samples=40, batch_size=2), Split(1)), lambda batch: batch)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(feed))


def resume(feed, epoch, batch):
    feed.run_state.resume(1, Position(epoch, batch))
    feed.reader.resume_at(epoch)


def test_a_feed_resumes_within_an_epoch():
    """The batches before the resume point keep their places, and are not read."""
    source = SlowSource()
    order = Order(num_samples=40, batch_size=8, seed=3)
    whole = Feed(SampleReader(source, order, Split(1)), lambda batch: batch.indices.tolist(), RunState())
    whole.run_state.begin_epoch(2)
    expected = list(whole)
    source.read = []
    source.inputs = lambda indices: source.read.append(indices.tolist()) or indices
    rest = Feed(SampleReader(source, order, Split(1)), lambda batch: batch.indices.tolist(), RunState())
    resume(rest, 2, 3)
    rest.run_state.begin_epoch(2)
    assert rest.run_state.num_skipped == 3
    assert list(rest) == expected[3:]
    assert sorted(source.read) == sorted(expected[3:])
    rest.run_state.begin_epoch(3)
    assert rest.run_state.num_skipped == 0 and len(list(rest)) == 5


def test_a_dataset_that_shuffles_itself_resumes():
    class Shuffling(Threes):
        def __init__(self):
            super().__init__()
            self.random = np.random.RandomState(0)

        def on_epoch_end(self):
            self.random.shuffle(self.rows)

    def feed():
        return Feed(IndexedReader(Shuffling(), Split(1)), lambda batch: batch.targets.tolist(), RunState())

    whole, rest = feed(), feed()
    for epoch in range(3):
        whole.run_state.begin_epoch(epoch)
        expected = list(whole)
    resume(rest, 2, 1)
    rest.run_state.begin_epoch(2)
    assert list(rest) == expected[1:]
    assert sorted(sum(expected, [])) == Y.tolist()
