"""Reads batches that come ready-made, by number (`PyDataset`); `streams.py` reads them in turn.

One process reads and hands out: an object that each process read by itself might give each of them other batches.
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

# Stands for a batch where there is none left.
END: Any = object()
# Number of the messages about the first batch; those of an epoch's batches have the next ones.
_FIRST = 0
# So long the others wait when rank 0 could not read: its error has the frames, and the first one that is seen is shown.
_SECONDS_TO_RAISE = 1.0


class BatchReader(Reader):
    """What the readers of ready-made batches share.

    Attributes:
        warn: prints a line about the data, where it is read.
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
            batches: gives batches.
            split: see the attributes of `Reader`; so is `warn`.
            steps: batches of an epoch; None: all there are.
            class_weight: weight of the samples of a class, for the loss.
            scatter: hands out what rank 0 reads; None: there is one process.
        """
        self.batches, self.split, self.warn = batches, split, warn
        self._steps, self._class_weight, self._scatter = steps, class_weight, scatter
        self.hands_out, self._reads = scatter is not None, scatter is None or scatter.rank == 0
        self._num_processes = 1 if scatter is None else scatter.num_processes
        self._known_first: tuple[Any, Any, Any] | None = None

    def first(self) -> Batch:
        """See `Reader`."""
        return batch_of(self._first(), self.split)

    def sample(self, num_rows: int) -> Any:
        """See `Reader`."""
        return take_rows(self._first(), np.resize(np.arange(num_samples(self._first())), num_rows))

    def _first(self) -> tuple[Any, Any, Any]:
        """Returns inputs, targets and sample weights of all rows of the first batch."""
        if self._known_first is None:
            self._known_first = self._handed_out(self._look, lambda data: [data] * self._num_processes, _FIRST)
            if self._known_first is None:
                kind = type(self.batches).__name__
                raise UserError(f"x: expected at least one batch. Received: none from the {kind}")
        return self._known_first

    @abc.abstractmethod
    def _look(self) -> Any:
        """Returns the first batch as the object gives it; END if there is none."""

    def _handed_out(self, read: Callable[[], Any], cut: Callable[[Any], list[Any]], number: int) -> Any:
        """Returns what rank 0 cuts for this process of what it reads; None where there is nothing left."""
        if self._scatter is None:
            data = read()
            return None if data is END else cut(self._unpacked(data))[0]
        parts: list[Any] = [None] * self._num_processes
        error: Exception | None = None
        if self._reads:
            try:
                data = read()
                parts = parts if data is END else cut(self._unpacked(data))
            except Exception as raised:  # all processes are to end with it
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
                raise UserError("give class_weight, or sample weights in the batches of x, not both")
            sample_weight = weights_of_classes(targets, self._class_weight)
        return inputs, targets, sample_weight

    def _parts(self, data: tuple[Any, Any, Any], first: int) -> list[Batch]:
        """Cuts a global batch for each process. `first`: index of its first row in the data set."""
        rank, num_shards = self.split.shard
        ranks = [rank] if self._scatter is None else range(self._num_processes)
        splits = [dataclasses.replace(self.split, shard=(rank % num_shards, num_shards)) for rank in ranks]
        return [batch_of(data, split, first) for split in splits]


class IndexedReader(BatchReader):
    """Batches of a `keras.utils.PyDataset`, by number, in the run's order, with its threads."""

    def __init__(self, batches: keras.utils.PyDataset, *args: Any, order_seed: int | None = None, **kwargs: Any):
        """`order_seed` shuffles the batches; None keeps their order. The others: as in `BatchReader`.

        Raises:
            UserError: if there is no number of batches, or processes are to read them.
        """
        super().__init__(batches, *args, **kwargs)
        if batches.use_multiprocessing:
            raise UserError(
                f"x: the {type(batches).__name__} has use_multiprocessing=True: leave it out, for workers=N threads, "
                "or let the processes of a torch DataLoader (num_workers=N) read"
            )
        if batches.num_batches is None:
            raise UserError(f"x: the {type(batches).__name__} has no number of batches; give it one by __len__")
        self._order = Order(
            num_samples=batches.num_batches,
            batch_size=1,
            seed=order_seed or 0,
            shuffle=order_seed is not None,
            steps_per_epoch=self._steps,
        )
        self.num_batches, self.num_threads = self._order.num_batches, max(1, batches.workers)
        # Batch 0, read ahead of its turn: a data set that draws its own numbers would give another one the next time.
        self._held: Any = None
        self._is_begun = False

    def _begin(self) -> None:
        if not self._is_begun:
            self.batches.on_epoch_begin()
        self._is_begun = True

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """See `Reader`."""
        self._begin()
        for number, (index,) in enumerate(self._order.batches(epoch, start), start):
            yield functools.partial(self._read, int(index), number)

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:
        """See `Reader`."""
        for _ in range(epoch):
            self._begin()
            self.batches.on_epoch_end()
            self._held, self._is_begun = None, False

    def end_epoch(self, number: int) -> None:
        """See `Reader`."""
        self._held, self._is_begun = None, False
        if number == self.num_batches:  # not before its last batch was read: it may shuffle
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
