"""Reads data that already consists of batches.

This module reads batches by index (`PyDataset`). `streams.py` reads batches sequentially. Only rank 0 reads the data,
and sends each rank a shard of each batch. If each rank read the data itself, the ranks could get different batches.
"""

import abc
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.data.batch import Batch, Reader, batch_of
from kerasdp.data.sampling import Order, Split
from kerasdp.data.sources import as_arrays, num_samples, take_rows, weights_of_classes
from kerasdp.errors import UserError, WorkerError
from kerasdp.processes.ranks import Scatter

# Marks the end of the batches.
END: Any = object()
# Number of the messages with the first batch. The batches of an epoch use the numbers after it.
_FIRST = 0
# Delay of the other ranks after a read error of rank 0. The first error is shown, and only rank 0's has the traceback.
_SECONDS_TO_RAISE = 1.0


class BatchReader(Reader):
    """Base class of the readers for data that already consists of batches.

    Attributes:
        warn: function that prints a warning about the data.
    """

    def __init__(
        self,
        batches: Any,
        split: Split,
        steps: int | None = None,
        *,
        class_weight: dict[int, float] | None = None,
        scatter: Scatter | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ):
        """Makes the reader of this process.

        Args:
            batches: the object that contains the batches.
            split: how each batch is split over all replicas.
            steps: number of batches of an epoch; None: all batches of the data.
            class_weight: loss weight of each class.
            scatter: function that sends the shards of a batch from rank 0 to all ranks; None if there is only one
                process.
            warn: function that prints a warning about the data.
        """
        self.batches, self.split, self.warn = batches, split, warn
        self._steps, self._class_weight, self._scatter = steps, class_weight, scatter
        self.hands_out, self._reads = scatter is not None, scatter is None or scatter.rank == 0
        self._num_processes = 1 if scatter is None else scatter.num_processes
        self._known_first: tuple[Any, Any, Any] | None = None

    def first(self) -> Batch:
        """Returns the first batch; see `Reader.first`."""
        return batch_of(self._first(), self.split)

    def sample(self, num_rows: int) -> Any:
        """Returns `num_rows` rows of the first batch; see `Reader.sample`."""
        return take_rows(self._first(), np.resize(np.arange(num_samples(self._first())), num_rows))

    def _first(self) -> tuple[Any, Any, Any]:
        """Returns inputs, targets and sample weights of all rows of the first batch."""
        if self._known_first is None:
            self._known_first = self._handed_out(self._look, lambda data: [data] * self._num_processes, _FIRST)
            if self._known_first is None:
                kind = type(self.batches).__name__
                raise UserError(f"x: expected at least one batch. Received: none from the {kind}; pass more data")
        return self._known_first

    @abc.abstractmethod
    def _look(self) -> Any:
        """Returns the first batch in the form in which the data yields it; `END` if there is no batch."""

    def _handed_out(self, read: Callable[[], Any], cut: Callable[[Any], list[Any]], number: int) -> Any:
        """Reads a batch on rank 0. Returns this process's shard of the batch; None if there is no batch left.

        Args:
            read: function that reads the batch.
            cut: function that splits the batch into one value for each process.
            number: number of the message that carries the batch.
        """
        if self._scatter is None:
            data = read()
            return None if data is END else cut(self._unpacked(data))[0]
        parts: list[Any] = [None] * self._num_processes
        error: Exception | None = None
        if self._reads:
            try:
                data = read()
                parts = parts if data is END else cut(self._unpacked(data))
            except Exception as raised:  # all processes have to end with it
                error = raised
                known = type(raised) if isinstance(raised, UserError) else WorkerError
                text = str(raised) if known is UserError else f"rank 0 could not read a batch: {raised!r}"
                parts = [known(text)] * self._num_processes
        part = self._scatter(parts, number)
        if error is not None:
            raise error
        if isinstance(part, Exception):
            if isinstance(part, WorkerError):
                time.sleep(_SECONDS_TO_RAISE)
            raise part
        return part

    def _unpacked(self, data: Any) -> tuple[Any, Any, Any]:
        inputs, targets, sample_weight = as_arrays(keras.utils.unpack_x_y_sample_weight(data))
        if self._class_weight is not None:
            if sample_weight is not None:
                raise UserError("expected either class_weight or sample weights in x. Received: both; remove one")
            sample_weight = weights_of_classes(targets, self._class_weight)
        return inputs, targets, sample_weight

    def _parts(self, data: tuple[Any, Any, Any], first: int) -> list[Batch]:
        """Splits a global batch into one `Batch` for each process.

        `first` is the index of the batch's first row in the data set.
        """
        rank, num_shards = self.split.shard
        ranks = [rank] if self._scatter is None else range(self._num_processes)
        splits = [dataclasses.replace(self.split, shard=(rank % num_shards, num_shards)) for rank in ranks]
        return [batch_of(data, split, first) for split in splits]


class IndexedReader(BatchReader):
    """Reads the batches of a `keras.utils.PyDataset` by index, in the order of the run."""

    def __init__(self, batches: keras.utils.PyDataset, *args: Any, order_seed: int | None = None, **kwargs: Any):
        """Makes the reader.

        Args:
            batches: the data set.
            *args: see `BatchReader`.
            order_seed: seed of the order of the batches; None: the order of the data set.
            **kwargs: see `BatchReader`.

        Raises:
            UserError: if the data set has no length, or reads with multiprocessing.
        """
        super().__init__(batches, *args, **kwargs)
        if batches.use_multiprocessing:
            raise UserError(
                f"x: the {type(batches).__name__} has use_multiprocessing=True, which is not supported; remove it and "
                "use threads (workers=N), or use a torch DataLoader with processes (num_workers=N)"
            )
        if batches.num_batches is None:
            raise UserError(f"x: the {type(batches).__name__} has no length; define __len__")
        self._order = Order(
            num_samples=batches.num_batches,
            batch_size=1,
            seed=order_seed or 0,
            shuffle=order_seed is not None,
            steps_per_epoch=self._steps,
        )
        self.num_batches, self.num_threads = self._order.num_batches, max(1, batches.workers)
        # Batch 0, read ahead of its turn. A data set with random augmentation would return a different batch next time.
        self._held: Any = None
        self._is_begun = False

    def _begin(self) -> None:
        if not self._is_begun:
            self.batches.on_epoch_begin()
        self._is_begun = True

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """Yields, for each batch, a function that reads the batch; see `Reader.epoch`."""
        self._begin()
        for number, (index,) in enumerate(self._order.batches(epoch, start), start):
            yield functools.partial(self._read, int(index), number)

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:
        """Calls `on_epoch_begin` and `on_epoch_end` of the data set for each finished epoch.

        See `Reader.resume_at`.
        """
        for _ in range(epoch):
            self._begin()
            self.batches.on_epoch_end()
            self._held, self._is_begun = None, False

    def end_epoch(self, number: int) -> None:
        """Calls `on_epoch_end` of the data set if all of its batches were read; see `Reader.end_epoch`."""
        self._held, self._is_begun = None, False
        if number == self.num_batches:  # only after its last batch was read: it may shuffle
            self.batches.on_epoch_end()

    def _look(self) -> Any:
        self._begin()
        if self._held is None:
            self._held = self.batches[0]
        return self._held

    def _read(self, index: int, number: int) -> Batch | None:
        def read() -> Any:
            held = self._held
            if index == 0 and held is not None:
                self._held = None
                return held
            return self.batches[index]

        def cut(data: Any) -> list[Batch]:
            return self._parts(data, number * num_samples(self._first()))

        self._first()
        return self._handed_out(read, cut, number + 1)
