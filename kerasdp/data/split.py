"""Decides which rows of a global batch each replica has: pure NumPy, the same on every backend."""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from kerasdp.data.sampling import pad_rows, replica_rows, shard_rows


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


class Split:
    """Splits global batches over the replicas of a run: into equal shards, or by the replicas' shares.

    Attributes:
        num_replicas: of the run.
        shares: to which the replicas' rows are proportional, whole numbers from 1. None: all replicas have equally many
            rows, the last ones padding. May be set between two calls of `fit`, `evaluate` or `predict`.
    """

    def __init__(self, num_replicas: int, shares: tuple[int, ...] | None = None):
        self.num_replicas, self.shares = num_replicas, shares

    def replicas(self, num_rows: int) -> tuple[ReplicaRows, ...]:
        """Returns which rows of a batch of `num_rows` each replica has, in the order of the rows."""
        return _replicas(num_rows, self.num_replicas, self.shares)

    def rows_of_process(self, num_rows: int, shard: tuple[int, int]) -> np.ndarray:
        """Returns the indices, within a batch of `num_rows`, of the rows of one process's replicas, in order.

        Padding is the last row of the batch.

        Args:
            num_rows: of the batch.
            shard: rank, and number of processes.
        """
        if self.shares is None:
            return shard_rows(pad_rows(np.arange(num_rows), self.num_replicas), shard)
        rank, num_processes = shard
        count = self.num_replicas // num_processes
        own = self.replicas(num_rows)[rank * count : (rank + 1) * count]
        rows = [np.arange(each.first, each.first + each.size) for each in own]
        return np.minimum(np.concatenate(rows), num_rows - 1)


@functools.lru_cache(maxsize=64)  # each step asks, on each replica
def _replicas(num_rows: int, num_replicas: int, shares: tuple[int, ...] | None) -> tuple[ReplicaRows, ...]:
    if shares is None:
        size = replica_rows(num_rows, num_replicas)
        firsts = [rank * size for rank in range(num_replicas)]
        return tuple(ReplicaRows(first, min(max(num_rows - first, 0), size), size) for first in firsts)
    total = sum(shares)
    ends = [(num_rows * share + total // 2) // total for share in itertools.accumulate(shares)]
    pairs = itertools.pairwise([0, *ends])
    return tuple(ReplicaRows(first, end - first, max(end - first, 1)) for first, end in pairs)
