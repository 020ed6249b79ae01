"""Defines what one process sees of a step's data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kerasdp.data.sampling import pad_rows, replica_rows
from kerasdp.data.sources import num_samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's data as one process sees it, in NumPy.

    Args:
        inputs: this process's rows (an array, or a structure of arrays), padded so that its replicas hold equally
            many; padding rows are copies and stand at the very end of the global batch. Or `CachedRows`.
        targets: of the same rows; None if there are none.
        sample_weight: likewise.
        indices: place in the data set of each row of the global batch, int64, shape `(rows,)`. Its length is the
            number of real rows.
        own_indices: place in the data set of each of this process's rows.
    """

    inputs: Any
    targets: Any
    sample_weight: Any
    indices: np.ndarray
    own_indices: np.ndarray


# Raises `UserError` if a batch, by its number in the epoch, is one that a model cannot learn from.
BatchCheck = Callable[[Batch, int], None]


def batch_of(data: tuple[Any, Any, Any], num_replicas: int, shard: tuple[int, int], first: int = 0) -> Batch:
    """Returns what a process sees of a global batch.

    Args:
        data: inputs, targets and sample weights of the global batch, in NumPy.
        num_replicas: over all processes.
        shard: rank, and number of processes.
        first: index of the batch's first row in the data set.
    """
    num_rows = num_samples(data)
    rows = shard_rows(pad_rows(np.arange(num_rows), num_replicas), shard)
    inputs, targets, sample_weight = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)
    return Batch(
        inputs=inputs,
        targets=targets,
        sample_weight=sample_weight,
        indices=np.arange(first, first + num_rows),
        own_indices=first + rows,
    )


def shard_rows(rows: np.ndarray, shard: tuple[int, int]) -> np.ndarray:
    """Returns the rows of one of so many processes. `shard`: rank, and number of processes."""
    rank, num_processes = shard
    size = replica_rows(len(rows), num_processes)
    return rows[rank * size : (rank + 1) * size]
