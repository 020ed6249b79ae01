"""Brings batches to the devices: reads ahead in threads, pads, and shards."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from kerasdp.data.device_cache import CachedRows, DeviceCache
from kerasdp.data.sampling import SKIPPED, Order, pad_rows, replica_rows
from kerasdp.data.sources import ArraySource, as_arrays, num_samples
from kerasdp.errors import UserError
from kerasdp.keras_compat import DataAdapter
from kerasdp.runtime.run_state import RunState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's data as one process sees it, in NumPy.

    Args:
        inputs: this process's rows (an array, or a structure of arrays), padded so that its replicas hold equally
            many; padding rows are copies and stand at the very end of the global batch. Or `CachedRows`.
        targets: of ALL rows of the global batch, no padding: they are small, and the loss is that of the whole
            batch. None if there are none.
        sample_weight: likewise.
        indices: place in the data set of each row of the global batch, int64, shape `(rows,)`. Its length is the
            number of real rows.
    """

    inputs: Any
    targets: Any
    sample_weight: Any
    indices: np.ndarray


# Raises `UserError` if a batch, by its number in the epoch, is one that a model cannot learn from.
BatchCheck = Callable[[Batch, int], None]


class SampleReader:
    """Batches of a source that can be read sample by sample (see `kerasdp.data.sources.Source`).

    Attributes:
        check: looks at each batch that is read for a feed, if there is one.
    """

    check: BatchCheck | None = None

    def __init__(self, source: Any, order: Order, num_replicas: int, shard: tuple[int, int], is_kept: bool = False):
        """`shard` is (rank, number of processes). `is_kept`: the source's arrays stay on the devices."""
        self._kept = DeviceCache(source.arrays) if is_kept else None
        self.source, self.order, self.num_replicas, self.shard = source, order, num_replicas, shard
        self.num_batches = order.num_batches
        self.num_threads = source.num_threads

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch]]:
        """Yields a function per batch, from batch `start` on, that reads it; to be called in any order, in threads."""
        for indices in self.order.epoch(epoch)[start:]:
            yield functools.partial(self._read, indices, self._kept)

    # The order is that of `Order`, which depends on seed and epoch alone.
    has_own_order = False

    def resume_at(self, epoch: int) -> None:
        """Does nothing: the order of an epoch depends on no other."""

    def first(self) -> Batch:
        """Reads the first batch of the order, for its shapes."""
        return self._read(self.order.epoch(0)[0], None)

    def whole(self, epoch: int, number: int) -> Batch | None:
        """Reads a batch with all rows of its inputs, to look at its numbers; None of data that is not in memory."""
        steps = self.order.epoch(epoch)
        if not isinstance(self.source, ArraySource) or number >= len(steps):
            return None
        indices = steps[number]
        targets, sample_weight = self.source.targets(indices)
        inputs = self.source.inputs(indices)
        return Batch(inputs=inputs, targets=targets, sample_weight=sample_weight, indices=indices)

    def sample(self, num_rows: int) -> Any:
        """Reads so many rows of the first batch, the same in each process: inputs, targets, sample weights.

        A batch of fewer rows begins anew.
        """
        rows = np.resize(self.order.epoch(0)[0], num_rows)
        return self.source.inputs(rows), *self.source.targets(rows)

    def _read(self, indices: np.ndarray, kept: DeviceCache | None) -> Batch:
        rows = _shard_of(pad_rows(indices, self.num_replicas), self.shard)
        targets, sample_weight = self.source.targets(indices)
        return Batch(
            inputs=self.source.inputs(rows) if kept is None else CachedRows(kept=kept, numbers=rows.astype("int32")),
            targets=targets,
            sample_weight=sample_weight,
            indices=indices,
        )


class BatchReader:
    """Batches that come ready-made: a `keras.utils.PyDataset`, or anything that can be iterated anew each epoch.

    Attributes:
        check: as in `SampleReader`.
    """

    num_threads = 1
    check: BatchCheck | None = None

    def __init__(
        self,
        batches: Any,
        order_seed: int | None,
        num_replicas: int,
        shard: tuple[int, int],
        steps: int | None = None,
    ):
        """`order_seed` shuffles the batches of a PyDataset; None keeps their order.

        `steps` are the batches of an epoch, None: all; the next epoch continues from there (except in a PyDataset).
        """
        self.batches, self.order_seed, self.num_replicas, self.shard = batches, order_seed, num_replicas, shard
        self.is_indexed = isinstance(batches, keras.utils.PyDataset)
        self.num_batches = steps or (batches.num_batches if self.is_indexed else _length(batches))
        self._steps, self._stream, self._num_streamed = steps, None, 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch]]:
        """Yields a function per batch, as `SampleReader`."""
        first = 0
        for number, data in enumerate(self._epoch_batches(epoch)):
            batch = self._cut(data, first)
            first += len(batch.indices)
            if number >= start:
                yield functools.partial(_same, batch)
        if self.is_indexed:
            self.batches.on_epoch_end()

    @property
    def has_own_order(self) -> bool:
        """Returns whether only the object that gives the batches knows their order, as tf.data and a DataLoader."""
        return not self.is_indexed

    def resume_at(self, epoch: int) -> None:
        """Lets a PyDataset prepare for an epoch as if those before it had been trained on."""
        if self.is_indexed:
            for _ in range(epoch):
                self.batches.on_epoch_end()

    def first(self) -> Batch:
        """Reads the first batch, for its shapes; it will come again."""
        return self._cut(self._first(), 0)

    def sample(self, num_rows: int) -> Any:
        """Reads so many rows of the first batch, as `SampleReader`."""
        data = as_arrays(keras.utils.unpack_x_y_sample_weight(self._first()))
        rows = np.resize(np.arange(num_samples(data)), num_rows)
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)

    def _first(self) -> Any:
        if self.is_indexed and self.batches.num_batches:
            return self.batches[0]
        iterator = iter(self.batches)
        data = next(iterator, None)
        if data is None:
            raise UserError(f"x: expected at least one batch. Received: none from the {type(self.batches).__name__}")
        if iterator is self.batches:  # a generator: what was taken must be put back
            self.batches = itertools.chain([data], iterator)
        return data

    def whole(self, epoch: int, number: int) -> Batch | None:
        """Returns None: a batch cannot be read again, or another one would come next."""

    def _epoch_batches(self, epoch: int) -> Iterator[Any]:
        if not self.is_indexed and self._steps is None:
            yield from self.batches
            return
        if not self.is_indexed and self._steps is not None:
            stream = self._stream = iter(self.batches) if self._stream is None else self._stream
            # Epochs that came before this one, of a run that was resumed, are read and dropped.
            ahead = epoch * self._steps - self._num_streamed
            collections.deque(itertools.islice(stream, max(ahead, 0)), maxlen=0)
            self._num_streamed = max(self._num_streamed, epoch * self._steps)
            for data in itertools.islice(stream, self._steps):
                self._num_streamed += 1
                yield data
            return
        order = Order(
            num_samples=self.batches.num_batches,
            batch_size=1,
            seed=self.order_seed or 0,
            shuffle=self.order_seed is not None,
            steps_per_epoch=self._steps,
        )
        steps = order.epoch(epoch)
        for (step,) in steps:
            yield self.batches[int(step)]

    def _cut(self, data: Any, first: int) -> Batch:
        data = as_arrays(keras.utils.unpack_x_y_sample_weight(data))
        return batch_of(data, self.num_replicas, self.shard, first)


class Feed:
    """The batches of the epoch that is running, read and brought to the devices ahead of their use."""

    def __init__(
        self, reader: SampleReader | BatchReader, shard_batch: Callable[[Batch], Any], run_state: RunState | None = None
    ):
        """Reads whatever epoch `run_state` says, without the batches before a resume point; None: always the first.

        `shard_batch` brings a batch to this process's devices; it is called in a reading thread.
        """
        self.reader, self.shard_batch = reader, shard_batch
        self.num_batches = reader.num_batches
        # Keras makes iterators earlier than it uses them, so it is read at the first `next`.
        self.run_state = RunState() if run_state is None else run_state

    def __iter__(self) -> Iterator[Any]:
        # Keras counts the batches of an epoch from 0, and so do its callbacks.
        yield from itertools.repeat(SKIPPED, self.run_state.num_skipped)
        with ThreadPoolExecutor(self.reader.num_threads) as pool:
            ahead: collections.deque[Future[Any]] = collections.deque()
            try:
                start = self.run_state.num_skipped
                for number, read in enumerate(self.reader.epoch(self.run_state.epoch, start), start):
                    ahead.append(pool.submit(self._read_and_shard, read, number))
                    if len(ahead) > 2 * self.reader.num_threads:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def _read_and_shard(self, read: Callable[[], Batch], number: int) -> Any:
        batch = read()
        if self.reader.check is not None:
            self.reader.check(batch, number)
        return self.shard_batch(batch)


class FeedAdapter(DataAdapter):
    """Hands the feed to Keras' trainer, whichever kind of iterator it asks for."""

    num_batches = batch_size = None  # of the instance; Keras has properties in their place
    has_partial_batch = False
    partial_batch_size = None

    def __init__(self, batches: Any, num_batches: int | None, batch_size: int):
        self._batches, self.num_batches, self.batch_size = batches, num_batches, batch_size

    def _get(self) -> Any:
        return self._batches

    get_numpy_iterator = get_jax_iterator = get_torch_dataloader = get_tf_dataset = _get


def batch_of(data: tuple[Any, Any, Any], num_replicas: int, shard: tuple[int, int], first: int = 0) -> Batch:
    """Returns what a process sees of a global batch.

    Args:
        data: inputs, targets and sample weights of the global batch, in NumPy.
        num_replicas: over all processes.
        shard: rank, and number of processes.
        first: index of the batch's first row in the data set.
    """
    inputs, targets, sample_weight = data
    num_rows = num_samples(data)
    rows = _shard_of(pad_rows(np.arange(num_rows), num_replicas), shard)
    return Batch(
        inputs=keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], inputs),
        targets=targets,
        sample_weight=sample_weight,
        indices=np.arange(first, first + num_rows),
    )


def _shard_of(rows: np.ndarray, shard: tuple[int, int]) -> np.ndarray:
    rank, num_processes = shard
    size = replica_rows(len(rows), num_processes)
    return rows[rank * size : (rank + 1) * size]


def _same(batch: Batch) -> Batch:
    return batch


def _length(batches: Any) -> int | None:
    if hasattr(batches, "cardinality"):  # tf.data: negative where it is infinite or unknown
        cardinality = int(batches.cardinality())
        return cardinality if cardinality >= 0 else None
    return len(batches) if hasattr(batches, "__len__") else None
