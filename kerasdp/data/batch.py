"""Defines what one process sees of a step's data, and reads it from samples that can be read by number."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.data.sampling import CachedRows, DeviceCache, Order, Split
from kerasdp.data.sources import ArraySource, in_floatx, num_samples, take_rows


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
    inputs, targets, sample_weight = take_rows(data, rows)
    return Batch(
        inputs=inputs,
        targets=targets,
        sample_weight=sample_weight,
        indices=np.arange(first, first + num_rows),
        own_indices=first + rows,
    )


class SampleReader:
    """Batches of a source that can be read sample by sample (see `kerasdp.data.sources.Source`).

    Attributes:
        check: looks at each batch that is read for a feed, if there is one.
        name: of the data set, if it has one.
    """

    check: BatchCheck | None = None

    def __init__(self, source: Any, order: Order, split: Split, shard: tuple[int, int], is_kept: bool = False):
        """`shard` is (rank, number of processes). `is_kept`: the source's arrays stay on the devices."""
        self._kept = DeviceCache(in_floatx(keras.tree.map_structure(np.asarray, source.arrays))) if is_kept else None
        self.source, self.order, self.split, self.shard = source, order, split, shard
        self.num_batches = order.num_batches
        self.num_threads = source.num_threads
        self.name: str = getattr(source, "name", "")

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch]]:
        """Yields a function per batch, from batch `start` on, that reads it; to be called in any order, in threads."""
        for indices in self.order.batches(epoch, start):
            yield functools.partial(self._read, indices, self._kept)

    # The order is that of `Order`, which depends on seed and epoch alone.
    hands_out = False

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:
        """Does nothing: the order of an epoch depends on no other."""

    def saved_state(self, epoch: int, batch: int) -> None:
        """Returns None: a batch is known by its number."""

    def end_epoch(self, number: int) -> None:
        """Does nothing: a sample can be read at any time."""

    def first(self) -> Batch:
        """Reads the first batch of the order, for its shapes."""
        return self._read(self.order.batch(0, 0), None)

    def first_targets(self) -> tuple[Any, Any]:
        """Reads targets and sample weights of all rows of the first batch, however many replicas there are."""
        return self.source.targets(self.order.batch(0, 0))

    def whole(self, epoch: int, number: int) -> Batch | None:
        """Reads a batch with all rows of its inputs, to look at its numbers; None of data that is not in memory."""
        if not isinstance(self.source, ArraySource) or number >= self.num_batches:
            return None
        indices = self.order.batch(epoch, number)
        targets, sample_weight = self.source.targets(indices)
        inputs = self.source.inputs(indices)
        return Batch(inputs=inputs, targets=targets, sample_weight=sample_weight, indices=indices, own_indices=indices)

    def sample(self, num_rows: int) -> Any:
        """Reads so many rows of the first batch, the same in each process: inputs, targets, sample weights.

        A batch of fewer rows is repeated.
        """
        rows = np.resize(self.order.batch(0, 0), num_rows)
        return self.source.inputs(rows), *self.source.targets(rows)

    def _read(self, indices: np.ndarray, kept: DeviceCache | None) -> Batch:
        rows = indices[self.split.rows_of_process(len(indices), self.shard)]
        targets, sample_weight = self.source.targets(rows)
        return Batch(
            inputs=self.source.inputs(rows) if kept is None else CachedRows(kept=kept, numbers=rows.astype("int32")),
            targets=targets,
            sample_weight=sample_weight,
            indices=indices,
            own_indices=rows,
        )
