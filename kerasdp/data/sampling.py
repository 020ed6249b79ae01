"""Decides which sample is in which row of which batch: pure NumPy, the same on every backend and device count."""

import dataclasses

import numpy as np


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the shuffled order of one epoch.

    The raw stream of Philox (Salmon et al. 2011) is used, which NumPy promises never to change (NEP 19); its
    `Generator.permutation` carries no such promise.

    Args:
        num_samples: samples of the data set.
        seed: the run's seed.
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

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """Returns the sample indices of each batch of an epoch, each of shape `(rows,)`."""
        batches: list[np.ndarray] = []
        first = epoch * self.num_batches
        for number in range(first, first + self.num_batches):
            data_pass, step = divmod(number, self.batches_per_pass)
            if not batches or step == 0:
                samples = (
                    epoch_order(self.num_samples, self.seed, data_pass) if self.shuffle else np.arange(self.num_samples)
                )
            batches.append(samples[step * self.batch_size : (step + 1) * self.batch_size])
        return batches


class _Skipped:
    """Stands for a batch that was consumed before the point at which the run resumes."""


SKIPPED = _Skipped()
