"""Decides which sample is in which row of which batch: pure NumPy, the same on every backend and device count."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from kerasdp.data.permutation import permuted, round_keys

# So many samples of an order are computed at once, whatever the batch: of fewer, NumPy's calls are most of the time.
_BLOCK = 4096


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


def seed_of_fit(seed: int, number: int) -> int:
    """Returns the seed of the orders of a model's first `fit` (`number` 0), which is the run's, or of a further one."""
    return seed if number == 0 else int(np.random.SeedSequence([seed % 2**64, number]).generate_state(1, np.uint64)[0])


def replica_rows(num_rows: int, num_replicas: int) -> int:
    """Returns the rows of each replica for a batch of `num_rows`; the last replica's may be padding."""
    return -(-num_rows // num_replicas)


def pad_rows(indices: np.ndarray, num_replicas: int) -> np.ndarray:
    """Repeats the last index until the rows divide by the replicas. Padding is always at the very end."""
    missing = replica_rows(len(indices), num_replicas) * num_replicas - len(indices)
    return np.concatenate([indices, np.repeat(indices[-1:], missing)])


def shard_rows(rows: np.ndarray, shard: tuple[int, int]) -> np.ndarray:
    """Returns the rows of one of so many processes. `shard`: rank, and number of processes."""
    rank, num_processes = shard
    size = replica_rows(len(rows), num_processes)
    return rows[rank * size : (rank + 1) * size]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """The batches of a whole run.

    Args:
        num_samples: samples of the data set.
        batch_size: samples of a global batch; the last batch of a pass holds what is left.
        seed: the run's seed.
        shuffle: a new order each epoch, else the order of the data set.
        steps_per_epoch: batches of an epoch. None: one pass. Else each epoch begins where the last one
            ended, and each pass has an order of its own.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    steps_per_epoch: int | None = None

    @property
    def batches_per_pass(self) -> int:
        """Batches in one pass over the data."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_batches(self) -> int:
        """Batches of an epoch."""
        return self.steps_per_epoch or self.batches_per_pass

    def batches(self, epoch: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yields the sample indices of each batch of an epoch from batch `start` on, int64, each of shape `(rows,)`.

        Neither memory nor the time to the first one grows with the number of samples or with `start`.
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
        """Returns the sample indices of one batch of an epoch, int64, shape `(rows,)`."""
        return next(self.batches(epoch, number))

    def _samples(self, data_pass: int, first: int, last: int) -> np.ndarray:
        """Returns the samples at these places of a pass."""
        if not self.shuffle:
            return np.arange(first, last)
        return permuted(np.arange(first, last), self.num_samples, round_keys(self.seed, data_pass))
