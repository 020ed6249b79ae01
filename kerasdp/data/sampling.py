"""Computes which samples are in each batch, and which rows of the batch each replica gets.

Uses only NumPy, so the samples of a batch are the same on every backend and for every number of devices. `CachedRows`
contains the indices of rows whose values are cached on the devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

# Samples of an order that are computed at once. With fewer, NumPy's call overhead takes most of the time.
_BLOCK = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Defines the order in which a run reads samples: the samples of each batch of each epoch.

    Args:
        num_samples: number of samples of the data set.
        batch_size: number of samples of a global batch. The last batch of a pass over the data may have fewer samples.
        seed: the seed of the run.
        shuffle: True: each pass has a new order. False: all passes have the order of the data set.
        steps_per_epoch: number of batches of an epoch. Each epoch begins where the previous epoch ended. None: an
            epoch is one pass over the data.

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

        Memory use and the time to the first batch do not depend on the number of samples or on `start`.

        Args:
            epoch: index of the epoch, from 0.
            start: index of the first batch, from 0.
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
        """Returns the sample indices at positions `first` to `last - 1` of a pass."""
        if not self.shuffle:
            return np.arange(first, last)
        return permuted(np.arange(first, last), self.num_samples, round_keys(self.seed, data_pass))


def seed_of_fit(seed: int, number: int) -> int:
    """Returns the seed of the batch order for one `fit` of a model.

    The first `fit` (`number` 0) uses the seed of the run. Each later `fit` gets a different seed.
    """
    return seed if number == 0 else int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)[0])


# With fewer rounds, orders of five or six samples are not uniform; see `tests/data/test_permutation.py`.
_ROUNDS = 16


def round_keys(seed: int, number: int) -> np.ndarray:
    """Returns the keys of the Feistel rounds in `permuted`, for permutation `number` of a seed.

    The keys are raw uint64 values of NumPy's Philox generator. NEP 19 guarantees that these values never change.
    """
    return np.random.Philox(key=[seed, number]).random_raw(_ROUNDS)


def permuted(places: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns the values at the given positions of a random permutation of `range(size)`.

    Writes each position as two digits. The product of the bases of the two digits is slightly more than `size`. A
    Feistel network permutes the pairs of digits. If a value is outside of the range, the network permutes the value
    again until it is inside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"). All computations use
    64-bit integers, so the result is the same on every machine.

    Args:
        places: positions from 0 to `size - 1`, an array of any shape.
        size: size of the permutation, less than 2**62.
        keys: keys from `round_keys`.

    Returns:
        An int64 array in the shape of `places`.
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
    """Hashes each value to a value from 0 to `base - 1`, with the mixer of SplitMix64 (Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((numbers >> np.uint64(32)) * base) >> np.uint64(32)


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a random order of the samples of a small data set.

    Sorts random integers, which needs 16 bytes of memory for each sample. Uses the raw stream of Philox (Salmon et al.
    2011), which NumPy promises never to change (NEP 19). NumPy does not promise this for `Generator.permutation`.

    Args:
        num_samples: number of samples.
        seed: seed of a run or of a data set.
        epoch: the epoch, from 0.

    Returns:
        A permutation of `range(num_samples)`, int64.
    """
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_samples)
    return np.argsort(keys, kind="stable")


class ReplicaRows(NamedTuple):
    """Describes the rows of one replica in a batch.

    Attributes:
        first: index of the replica's first row in the global batch.
        num_rows: number of rows without padding; may be 0.
        size: number of rows with padding; at least 1.
    """

    first: int
    num_rows: int
    size: int


@dataclasses.dataclass
class Split:
    """Splits global batches over the replicas of a run.

    Each replica gets the same number of rows. The last replicas get padding if there are too few rows.

    Attributes:
        num_replicas: number of replicas of the run.
        shard: index of the shard of the inputs that this process reads, and number of shards.
        is_one_program: whether one program computes the rows of all replicas, as on JAX.
        micro_batch_rows: number of rows of a micro-batch, over all replicas. None: there are no micro-batches. A
            micro-batch consists of consecutive rows of the batch. Each micro-batch is split over the replicas
            separately. The last micro-batch may have fewer rows.
    """

    num_replicas: int
    shard: tuple[int, int] = (0, 1)
    is_one_program: bool = False
    micro_batch_rows: int | None = None

    @property
    def runs_on_shards(self) -> bool:
        """Returns whether a call of a layer gets only one replica's shard of the batch."""
        return self.num_replicas > 1 and not self.is_one_program

    def replicas(self, num_rows: int, first: int = 0) -> tuple[ReplicaRows, ...]:
        """Splits consecutive rows over the replicas. Returns one `ReplicaRows` for each replica.

        Args:
            num_rows: number of rows.
            first: index of the first row in the global batch.
        """
        return _replicas(num_rows, self.num_replicas, first)

    def micro_batches(self, num_rows: int) -> list[tuple[ReplicaRows, ...]]:
        """Splits a batch of `num_rows` rows into micro-batches.

        Returns a tuple for each micro-batch, with one `ReplicaRows` for each replica.
        """
        size = self.micro_batch_rows or num_rows
        return [self.replicas(min(size, num_rows - first), first) for first in range(0, num_rows, size)]

    def rows_of_process(self, num_rows: int) -> np.ndarray:
        """Returns the indices of the rows that this process's replicas get from a batch of `num_rows` rows.

        The rows are sorted by replica. The rows of a replica are sorted by micro-batch. Padding repeats the last row of
        the micro-batch.
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
    """Returns the number of rows of each replica for a batch of `num_rows` rows, including padding."""
    return -(-num_rows // num_replicas)


class DeviceCache:
    """Caches whole arrays on each device. The arrays are copied to the devices at their first use."""

    def __init__(self, arrays: Any):
        self._arrays, self._copies = arrays, None

    def copies(self, make: Callable[[Any], Any]) -> Any:
        """Returns the copies on the devices. The first call creates the copies with `make`."""
        if self._copies is None:
            self._copies = make(self._arrays)
        return self._copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows:
    """Refers to rows of arrays that are cached on the devices.

    Args:
        kept: the cached arrays.
        numbers: indices of the rows, int32.
    """

    kept: DeviceCache
    numbers: np.ndarray
