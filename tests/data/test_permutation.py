"""A permutation that is never held in memory: it is one, it never changes, and it shuffles well."""

import collections
import math

import numpy as np
import pytest
from scipy import stats

from kerasdp.data.sampling import permuted, round_keys

# Each test asks for what a good shuffle fails once in ten million seeds; these are fixed.
UNLIKELY = 1e-7


def shuffled(size, seed=0, number=0):
    return permuted(np.arange(size), size, round_keys(seed, number))


def test_it_never_changes():
    # Golden: a run of today must be repeatable in years, on any machine.
    assert shuffled(10).tolist() == [4, 3, 6, 8, 0, 1, 2, 7, 5, 9]
    assert shuffled(10, 5, 3).tolist() == [6, 4, 8, 3, 0, 2, 5, 7, 1, 9]
    places = np.array([0, 1, 10**9 - 1, 5 * 10**8])
    assert permuted(places, 10**9, round_keys(0, 0)).tolist() == [808925393, 944478787, 391972896, 526885157]
    ends = permuted(np.array([0, 2**62 - 2]), 2**62 - 1, round_keys(1, 2)).tolist()
    assert ends == [2628537557879821315, 3148075058209001515]


def test_each_number_comes_once():
    for size in (*range(1, 70), 127, 128, 129, 997, 1023, 1024, 1025, 65535, 65536, 65537, 100003):
        numbers = shuffled(size, 3, size)
        assert numbers.dtype == np.int64
        assert np.array_equal(np.sort(numbers), np.arange(size)), size


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(shuffled(1000, seed, number)) for seed in range(30) for number in range(30)}
    assert len(orders) == 900
    one, other = shuffled(10**5, 0, 1), shuffled(10**5, 1, 0)
    assert (one == other).sum() < 10  # one is expected


@pytest.mark.short("3", "4")
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_likely(size):
    num_seeds = 40 * max(24, math.factorial(size))
    found = collections.Counter(tuple(shuffled(size, seed)) for seed in range(num_seeds))
    assert len(found) == math.factorial(size)
    assert stats.chisquare(list(found.values())).pvalue > UNLIKELY


@pytest.mark.short("100")
@pytest.mark.parametrize("size", [7, 100])
def test_each_sample_is_equally_likely_at_each_place(size):
    orders = np.array([shuffled(size, 11, epoch) for epoch in range(2000)])
    counts = [np.bincount(orders[:, place], minlength=size) for place in range(size)]
    statistic = sum(stats.chisquare(count).statistic for count in counts) * (size - 1) / size
    assert UNLIKELY < stats.chi2.sf(statistic, (size - 1) ** 2) < 1 - UNLIKELY


@pytest.mark.short("1-60000", "245-4096")
@pytest.mark.parametrize("size", [4096, 60000, 10**9])
@pytest.mark.parametrize("distance", [1, 2, 128, 245])  # next to each other; as far as the base of a digit
def test_neighbours_are_not_correlated(size, distance):
    count = min(size, 50000) - distance
    values = []
    for seed in range(10):
        numbers = permuted(np.arange(count + distance), size, round_keys(seed, 0)) / size
        values.append(np.corrcoef(numbers[:-distance], numbers[distance:])[0, 1] * math.sqrt(count))
        # How far apart: as of two independent numbers, whose distance has a triangular distribution.
        apart = np.abs(numbers[:-distance] - numbers[distance:])[::2]
        counts, _ = np.histogram(1 - (1 - apart) ** 2, bins=50, range=(0, 1))
        assert stats.chisquare(counts).pvalue > UNLIKELY
    assert stats.norm.sf(abs(sum(values)) / math.sqrt(len(values))) > UNLIKELY


def test_parts_of_the_data_are_spread_over_the_pass():
    """As data that is sorted by class needs it: each tenth of the data is in each tenth of the pass."""
    for size in (1000, 60000):
        table, _, _ = np.histogram2d(shuffled(size, 4, 4) * 10 // size, np.arange(size) * 10 // size, bins=10)
        assert stats.chi2_contingency(table).pvalue > UNLIKELY
