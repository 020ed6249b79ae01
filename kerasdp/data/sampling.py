"""Decides which sample is in which row of which batch, and which replica has that row.

Pure NumPy, the same on every backend and device count. Rows of data that stays on the devices are numbers, too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

# So many samples of an order are computed at once, whatever the batch: of fewer, NumPy's calls are most of the time.
_BLOCK = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The order in which a run reads the samples: which samples are in which batch of which epoch.

    Args:
        num_samples: number of samples of the data set.
        batch_size: samples of a global batch. The last batch of a pass over the data holds the rest.
        seed: the seed of the run.
        shuffle: True: each pass has a new order. False: all passes have the order of the data set.
        steps_per_epoch: batches of an epoch. None: an epoch is one pass. Otherwise an epoch begins where the epoch
            before it ended.

    Example:
        ```python
        import kerasdp

        order = kerasdp.Order(num_samples=64, batch_size=24, seed=0)
        print(order.num_batches)  # 3
        for indices in order.batches(epoch=0):
            print(indices.shape)  # (24,), (24,) and (16,)
        print(order.batch(epoch=1, number=2))  # the samples of one batch
        ```
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    steps_per_epoch: int | None = None

    @property
    def batches_per_pass(self) -> int:
        """Returns the number of batches in one pass over the data."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_batches(self) -> int:
        """Returns the number of batches of an epoch."""
        return self.steps_per_epoch or self.batches_per_pass

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yields the indices of the samples of each batch of an epoch, as int64 arrays of shape `(rows,)`.

        Neither the memory nor the time to the first batch grows with the number of samples or with `start`.

        Args:
            epoch: counted from 0.
            start: number of the first batch, counted from 0.
        """
        number, end = epoch * self.num_batches + start, (epoch + 1) * self.num_batches
        while number < end:
            data_pass, step = divmod(number, self.batches_per_pass)
            count = min(end - number, self.batches_per_pass - step, max(1, _BLOCK // self.batch_size))
            first, last = step * self.batch_size, min((step + count) * self.batch_size, self.num_samples)
            samples = self._samples(data_pass, first, last)
            for place in range(0, last - first, self.batch_size):
                yield samples[place : place + self.batch_size]
            number += count

    def batch(self, epoch: int, number: int) -> np.ndarray:
        """Returns the indices of the samples of one batch of an epoch, as an int64 array of shape `(rows,)`."""
        return next(self.batches(epoch, number))

    def _samples(self, data_pass: int, first: int, last: int) -> np.ndarray:
        """Returns the samples at these places of a pass."""
        if not self.shuffle:
            return np.arange(first, last)
        return permuted(np.arange(first, last), self.num_samples, round_keys(self.seed, data_pass))


def seed_of_fit(seed: int, number: int) -> int:
    """Returns the seed of the orders of a model's first `fit` (`number` 0), which is the run's, or of a further one."""
    return seed if number == 0 else int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)[0])


# Fewer leave orders of five or six samples uneven; `tests/data/test_permutation.py` sees it.
_ROUNDS = 16


def round_keys(seed: int, number: int) -> np.ndarray:
    """Returns the keys of permutation `number` of a seed: raw uint64 numbers of Philox, which NEP 19 keeps."""
    return np.random.Philox(key=[seed, number]).random_raw(_ROUNDS)


def permuted(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns the numbers at these places of a permutation of `range(size)`.

    A Feistel network over pairs of digits, whose bases multiply to a little more than `size`; what falls outside is
    permuted again, until it is inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). It computes
    with 64-bit whole numbers alone, so that it is the same everywhere.

    Args:
        places: from 0 to `size - 1`, of any shape.
        size: of the permutation, less than 2**62.
        keys: of `round_keys`.

    Returns:
        int64, in the shape of `places`.
    """
    # With an even base, both even and odd permutations come up.
    left_base = math.isqrt(size - 1) + 1
    right_base = -(-size // left_base)
    bases = np.uint64(left_base), np.uint64(right_base + right_base % 2)
    numbers = _shuffled(places.astype(np.uint64), bases, keys)
    while (outside := numbers >= size).any():
        numbers[outside] = _shuffled(numbers[outside], bases, keys)
    return numbers.astype(np.int64)


def _shuffled(numbers: np.ndarray, bases: tuple[np.uint64, np.uint64], keys: np.ndarray) -> np.ndarray:
    left_base, right_base = bases
    left, right = numbers // right_base, numbers % right_base
    for left_key, right_key in keys.reshape(-1, 2):
        left = left + _hashed(right ^ left_key, left_base)
        left -= left_base * (left >= left_base)
        right = right + _hashed(left ^ right_key, right_base)
        right -= right_base * (right >= right_base)
    return left * right_base + right


def _hashed(numbers: np.ndarray, base: np.uint64) -> np.ndarray:
    """Returns a number from 0 to `base - 1` for each, by the mixing of SplitMix64 (Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((numbers >> np.uint64(32)) * base) >> np.uint64(32)


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns an order of few samples, by sorting random numbers. Takes 16 bytes a sample.

    The raw stream of Philox (Salmon et al. 2011) is used, which NumPy promises never to change (NEP 19); its
    `Generator.permutation` carries no such promise.

    Args:
        num_samples: samples to be ordered.
        seed: of a run, or of a data set.
        epoch: counted from 0.

    Returns:
        A permutation of `range(num_samples)`, int64.
    """
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_samples)
    return np.argsort(keys, kind="stable")


class ReplicaRows(NamedTuple):
    """The rows of one replica.

    Attributes:
        first: index of its first row in the global batch.
        num_rows: of the replica; may be 0.
        size: rows that it is given, padding included; at least 1.
    """

    first: int
    num_rows: int
    size: int


@dataclasses.dataclass
class Split:
    """Splits global batches over the replicas of a run: equally many rows each, the last ones padding.

    Attributes:
        num_replicas: of the run.
        shard: of the inputs that this process reads: its number, and of how many.
        is_one_program: whether one program computes the rows of all replicas, as with jax.
        micro_batch_rows: rows of a micro-batch, over all replicas. A micro-batch is neighbouring rows of the batch, and
            is split over the replicas by itself; the last one may have fewer rows. None: the batch is not cut.
    """

    num_replicas: int
    shard: tuple[int, int] = (0, 1)
    is_one_program: bool = False
    micro_batch_rows: int | None = None

    @property
    def runs_on_shards(self) -> bool:
        """Returns whether layers are called with a shard of the batch alone."""
        return self.num_replicas > 1 and not self.is_one_program

    def replicas(self, num_rows: int, first: int = 0) -> tuple[ReplicaRows, ...]:
        """Returns which of some rows each replica has, in their order.

        Args:
            num_rows: how many there are.
            first: index of the first one in the global batch.
        """
        return _replicas(num_rows, self.num_replicas, first)

    def micro_batches(self, num_rows: int) -> list[tuple[ReplicaRows, ...]]:
        """Returns which rows each replica has of each micro-batch of a batch of `num_rows`."""
        size = self.micro_batch_rows or num_rows
        return [self.replicas(min(size, num_rows - first), first) for first in range(0, num_rows, size)]

    def rows_of_process(self, num_rows: int) -> np.ndarray:
        """Returns the indices, within a batch of `num_rows`, of the rows of this process's replicas, in order.

        Each replica has its rows of the first micro-batch, then its rows of the next. Padding is the last row of the
        micro-batch.
        """
        if self.num_replicas == 1 and self.micro_batch_rows is None:
            return np.arange(num_rows)
        rank, num_processes = self.shard
        count = self.num_replicas // num_processes
        micro_batches = self.micro_batches(num_rows)
        rows = []
        for replica in range(rank * count, (rank + 1) * count):
            for replicas in micro_batches:
                own, end = replicas[replica], replicas[0].first + sum(each.num_rows for each in replicas)
                rows.append(np.minimum(np.arange(own.first, own.first + own.size), end - 1))
        return np.concatenate(rows)


@functools.lru_cache(maxsize=512)  # each step asks, on each replica
def _replicas(num_rows: int, num_replicas: int, first: int) -> tuple[ReplicaRows, ...]:
    size = replica_rows(num_rows, num_replicas)
    places = [rank * size for rank in range(num_replicas)]
    return tuple(ReplicaRows(first + place, min(max(num_rows - place, 0), size), size) for place in places)


def replica_rows(num_rows: int, num_replicas: int) -> int:
    """Returns the rows of each replica for a batch of `num_rows`; the last replica's may be padding."""
    return -(-num_rows // num_replicas)


class DeviceCache:
    """Arrays that stay on the devices: each device has all of them from their first use on."""

    def __init__(self, arrays: Any):
        self._arrays, self._copies = arrays, None

    def copies(self, make: Callable[[Any], Any]) -> Any:
        """Returns what `make` made of the arrays when it was first called."""
        if self._copies is None:
            self._copies = make(self._arrays)
        return self._copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Rows of arrays that stay on the devices.

    Args:
        kept: the arrays.
        numbers: of the rows, int32.
    """

    kept: DeviceCache
    numbers: np.ndarray
