"""Sequences of similar length, padded to a few lengths."""

import numpy as np
import pytest

from kerasdp import Buckets
from kerasdp.errors import UserError

LENGTHS = (4, 8, 16)


def sequences_of(sizes):
    """Each begins with its own number, so that it is known again."""
    return [[number + 1] * size for number, size in enumerate(sizes)]


def made(batch_size=4, **settings):
    sizes = [1, 4, 2, 3, 4, 5, 8, 8, 7, 6, 5, 16, 9, 40]
    sequences = sequences_of(sizes)
    return sequences, Buckets(sequences, np.arange(len(sizes)), lengths=LENGTHS, batch_size=batch_size, **settings)


def epoch_of(buckets):
    buckets.on_epoch_begin()
    return [buckets[number] for number in range(len(buckets))]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_each_sequence_comes_once_in_few_shapes(shuffle, batch_size):
    sequences, buckets = made(batch_size, shuffle=shuffle)
    for _ in range(3):
        batches = epoch_of(buckets)
        assert sorted(np.concatenate([targets for _, targets in batches])) == list(range(len(sequences)))
        for inputs, targets in batches:
            assert inputs.dtype == "int32" and inputs.shape[1] in LENGTHS
            for row, number in zip(inputs, targets, strict=True):
                sequence = sequences[number][: inputs.shape[1]]
                np.testing.assert_array_equal(row, sequence + [0] * (inputs.shape[1] - len(sequence)))
        # Full, but for the last of the longest.
        assert [len(targets) for _, targets in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert len({inputs.shape for inputs, _ in batches}) <= len(LENGTHS) + 1
        if not shuffle or batch_size > 4:  # what is cut is longer than all
            assert batches[-1][0].shape[1] == 16


def test_epochs_are_shuffled_by_their_number_and_the_seed():
    def epochs(**settings):
        _, buckets = made(**settings)
        return [[targets.tolist() for _, targets in epoch_of(buckets)] for _ in range(3)]

    first = epochs()
    assert first == epochs() and first[0] != first[1] != first[2] and first != epochs(seed=1)
    fixed = epochs(shuffle=False)
    assert fixed[0] == fixed[1] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    _, buckets = made()
    before = buckets[0][1].tolist()  # looked at before the first epoch: it comes again
    assert epoch_of(buckets)[0][1].tolist() == before


def test_targets_that_are_sequences_are_padded_likewise():
    sequences = [np.array([1, 2, 3]), np.array([4])]
    buckets = Buckets(sequences, [[2, 3, 9], [5]], lengths=(4,), batch_size=2, shuffle=False, padding=7)
    ((inputs, targets),) = epoch_of(buckets)
    np.testing.assert_array_equal(inputs, [[1, 2, 3, 7], [4, 7, 7, 7]])
    np.testing.assert_array_equal(targets, [[2, 3, 9, 7], [5, 7, 7, 7]])


@pytest.mark.parametrize(
    ("sequences", "targets", "lengths"), [([], [], (4,)), ([[1]], [1, 2], (4,)), ([[1]], [1], ()), ([[1]], [1], (0,))]
)
def test_what_is_refused(sequences, targets, lengths):
    with pytest.raises(UserError, match="expected .* Received: "):
        Buckets(sequences, targets, lengths=lengths, batch_size=4)
