"""Defines what one process sees of a step's data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kerasdp.data.sources import num_samples
from kerasdp.data.split import Split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's data as one process sees it, in NumPy.

    Args:
        inputs: the rows of this process's replicas, one after the other (an array, or a structure of arrays), with
            padding as `Split` says, which is copies of the batch's last row. Or `CachedRows`.
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


def batch_of(data: tuple[Any, Any, Any], split: Split, shard: tuple[int, int], first: int = 0) -> Batch:
    """Returns what a process sees of a global batch.

    Args:
        data: inputs, targets and sample weights of the global batch, in NumPy.
        split: over all replicas.
        shard: rank, and number of processes.
        first: index of the batch's first row in the data set.
    """
    num_rows = num_samples(data)
    rows = split.rows_of_process(num_rows, shard)
    inputs, targets, sample_weight = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)
    return Batch(
        inputs=inputs,
        targets=targets,
        sample_weight=sample_weight,
        indices=np.arange(first, first + num_rows),
        own_indices=first + rows,
    )
