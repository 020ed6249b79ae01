"""Batches that come ready-made: each is read once, by one process, and goes to all."""

import random

import numpy as np
import pytest

from kerasdp.data.batch import Feed
from kerasdp.data.sampling import Split
from kerasdp.data.streams import StreamReader
from kerasdp.errors import UserError
from kerasdp.run_state import Position, RunState

X, Y = np.arange(44).reshape(22, 2), np.arange(22)


def batches(count=5, rows=4):
    return ((X[first : first + rows], Y[first : first + rows]) for first in range(0, count * rows, rows))


def reader_of(data, *, steps=None, replicas=1, shard=(0, 1), **options):
    return StreamReader(data, Split(replicas, shard), steps, **options)


def feed_of(reader):
    return Feed(reader, lambda batch: batch.targets.tolist(), RunState())


def firsts(found):
    return [targets[0] for targets in found]


def test_nothing_is_lost_or_read_twice():
    """By the first look, by reading ahead, and by a second `fit` after a first one that was stopped."""
    given, known = [], {}

    def counted():
        for number, batch in enumerate(batches(), 1):
            given.append(number)
            yield batch

    data = counted()
    reader = reader_of(data, known_streams=known)
    assert reader.first().targets.tolist() == [0, 1, 2, 3] and reader.sample(2)[1].tolist() == [0, 1]
    feed = feed_of(reader)
    iterator = iter(feed)
    taken = [next(iterator), next(iterator)]
    feed.close()
    again = reader_of(data, known_streams=known)
    again.first()
    taken += list(feed_of(again))
    assert firsts(taken) == [0, 4, 8, 12, 16]
    assert given == [1, 2, 3, 4, 5]


def test_what_can_be_read_once_has_no_second_epoch():
    feed = feed_of(reader_of(batches(), seed=0))
    assert len(list(feed)) == 5
    feed.run_state.begin_epoch(1)
    with pytest.raises(UserError, match="the generator is exhausted after 5 batches, .*steps_per_epoch"):
        list(feed)
    evaluated = feed_of(reader_of(batches(), steps=5))
    list(evaluated)
    with pytest.raises(UserError, match="is exhausted after 5 batches, .*validation_steps"):
        list(evaluated)


class Again:
    """Can be iterated again, in another order each time."""

    def __init__(self):
        self.opened = 0

    def __iter__(self):
        self.opened += 1
        yield from [batch for _, batch in sorted(((number * self.opened) % 7, b) for number, b in enumerate(batches()))]


def test_each_epoch_opens_what_can_be_iterated_again_once():
    data = Again()
    reader = reader_of(data)
    reader.first(), reader.first()
    feed = feed_of(reader)
    found = []
    for epoch in range(3):
        feed.run_state.begin_epoch(epoch)
        found.append(firsts(feed))
    assert data.opened == 3 and found[0] != found[1]
    assert all(sorted(epoch) == [0, 4, 8, 12, 16] for epoch in found)
    # Resumed, it is opened as often.
    warned = []
    rest = feed_of(reader_of(Again(), warn=warned.append))
    rest.reader.first()
    rest.run_state.resume(12, Position(2, 3))
    rest.reader.resume_at(2, 3, reader.saved_state(2, 3))
    rest.run_state.begin_epoch(2)
    assert firsts(rest) == found[2][3:]
    assert warned == ["--resume: 3 batches of the Again were read again and skipped"]


def test_resuming_with_other_batches_is_said():
    def saved_by(data):
        feed = feed_of(reader_of(data, steps=3))
        list(feed)
        return feed.reader.saved_state(0, 2)

    said = []
    for data in (batches(), reversed(list(batches()))):
        reader = reader_of(data, steps=3, warn=said.append)
        reader.resume_at(0, 2, saved_by(batches()))
    assert "seed the shuffling" not in said[0] and "seed the shuffling" in said[1]


def test_a_part_of_the_samples_is_refused():
    data = pytest.importorskip("torch.utils.data")
    sampler = data.DistributedSampler(range(8), num_replicas=2, rank=0)
    with pytest.raises(UserError, match="remove the sampler"):
        reader_of(data.DataLoader(range(8), 4, sampler=sampler))
    whole = data.DistributedSampler(range(8), num_replicas=1, rank=0)
    assert reader_of(data.DataLoader(range(8), 4, sampler=whole)).num_batches == 2


def test_an_epoch_longer_than_the_data_goes_on_with_the_next_pass_in_training():
    data = Again()
    feed = feed_of(reader_of(data, steps=7, seed=3))
    assert sorted(firsts(feed)[:5]) == [0, 4, 8, 12, 16] and len(list(feed)) == 7
    assert len(list(feed_of(reader_of(Again(), steps=7)))) == 5  # in an evaluation samples would count twice


def test_the_run_seeds_what_has_no_seed():
    class Unseeded:
        def __iter__(self):
            order = np.random.permutation(22), random.sample(range(22), 22)
            yield X[order[0]], Y[order[0]]
            yield X[order[1]], Y[order[1]]

    def epochs(seed):
        feed = feed_of(reader_of(Unseeded(), seed=seed))
        for epoch in range(2):
            feed.run_state.begin_epoch(epoch)
            yield list(feed)

    first, second = epochs(1)
    np.random.rand(7)
    assert [first, second] == list(epochs(1)) != list(epochs(2)) and first != second


def test_weights_of_classes():
    feed = Feed(reader_of(iter([(X[:3], np.array([0, 1, 1]))]), class_weight={0: 0.5, 1: 2.0}),
                lambda batch: batch.sample_weight.tolist())  # fmt: skip
    assert list(feed) == [[0.5, 2, 2]]
    weighted = reader_of(iter([(X[:3], Y[:3], np.ones(3))]), class_weight={0: 0.5})
    with pytest.raises(UserError, match="class_weight or sample weights in x"):
        weighted.first()
