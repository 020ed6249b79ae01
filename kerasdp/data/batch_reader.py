"""Reads batches that come ready-made, and hands them out; those of a PyDataset by number.

One process reads and hands out: an object that each process read by itself might give each of them other batches.
"""

import abc
import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import keras
import numpy as np

from kerasdp.data.batch import Batch, BatchCheck, batch_of
from kerasdp.data.sampling import Order
from kerasdp.data.sources import num_samples, weights_of_classes
from kerasdp.data.split import Split
from kerasdp.data.streams import END, unpacked
from kerasdp.errors import UserError, WorkerError
from kerasdp.runtime.ranks import Scatter
from kerasdp.runtime.workers import end_with_parent

# Number of the messages about the first batch; those of an epoch's batches have the next ones.
_FIRST = 0
# Shapes of inputs after which the reader says what they cost.
_MANY_SHAPES = 8


def _say_nothing(line: str) -> None:
    pass


class BatchReader(abc.ABC):
    """What the readers of ready-made batches share.

    Attributes:
        check: looks at each batch that is read for a feed, if there is one.
        name: of the data set: it has none.
        num_batches: of an epoch; None if the object does not tell.
        num_threads: that read at once.
        warn: prints a line about the data, where it is read.
    """

    check: BatchCheck | None = None
    name = ""
    num_threads = 1
    num_batches: int | None

    def __init__(
        self,
        batches: Any,
        split: Split,
        shard: tuple[int, int],
        steps: int | None = None,
        *,
        class_weight: dict[int, float] | None = None,
        scatter: Scatter | None = None,
        warn: Callable[[str], None] = _say_nothing,
    ):
        """Makes the reader of this process.

        Args:
            batches: gives batches.
            split: of a batch over all replicas.
            shard: rank, and number of processes that split a batch.
            steps: batches of an epoch; None: all there are.
            class_weight: weight of the samples of a class, for the loss.
            scatter: hands out what rank 0 reads; None: there is one process.
            warn: see the attribute.
        """
        self.batches, self.split, self.shard, self.warn = batches, split, shard, warn
        self._steps, self._class_weight, self._scatter = steps, class_weight, scatter
        self._reads = scatter is None or scatter.rank == 0
        self._first: Batch | None = None
        self._first_targets: tuple[Any, Any] = (None, None)
        self._shapes: set[Any] = set()

    @property
    def hands_out(self) -> bool:
        """Returns whether batches come from another process, so that all processes must take equally many."""
        return self._scatter is not None

    @abc.abstractmethod
    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """Yields a function per batch, as `SampleReader`; it returns None when there are no more.

        `end_epoch` is to be called when nothing is read any more.
        """

    @abc.abstractmethod
    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:
        """Lets the object prepare for a batch as if those before it had been trained on.

        Args:
            epoch: of the batch.
            batch: its number.
            saved: what `saved_state` gave for that place.
        """

    def saved_state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """Returns, in JSON, what `resume_at` needs to continue with a batch; None if that is nothing."""
        return None

    def end_epoch(self, number: int) -> None:
        """Ends an epoch of which the batches before `number` were taken."""
        if self._scatter is not None:
            self._scatter.finish()

    def first(self) -> Batch:
        """Returns the first batch, for its shapes; it will come again."""
        if self._first is None:

            def cut(data: Any) -> list[Batch]:
                self._first_targets = data[1:]
                return self._parts(data, 0)

            self._first = self._handed_out(self._look, cut, _FIRST)
            if self._first is None:
                kind = type(self.batches).__name__
                raise UserError(f"x: expected at least one batch. Received: none from the {kind}")
        return self._first

    def first_targets(self) -> tuple[Any, Any]:
        """Returns targets and sample weights of all rows of the first batch, where it is read: on rank 0."""
        self.first()
        return self._first_targets

    def sample(self, num_rows: int) -> Any:
        """Returns so many rows of the first batch, as `SampleReader`. Not to be called once an epoch has begun."""

        def rows_of(data: Any) -> list[Any]:
            rows = np.resize(np.arange(num_samples(data)), num_rows)
            part = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)
            return [part] * self._num_processes

        return self._handed_out(self._look, rows_of, _FIRST)

    def whole(self, epoch: int, number: int) -> Batch | None:
        """Returns None: a batch cannot be read again, or another one would come next."""
        return None

    @abc.abstractmethod
    def _look(self) -> Any:
        """Returns the first batch as the object gives it; END if there is none."""

    @property
    def _num_processes(self) -> int:
        return 1 if self._scatter is None else self._scatter.num_processes

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
        part = self._scatter(parts, number, wait=number == _FIRST or error is not None)
        if error is not None:
            raise error
        if isinstance(part, Exception):
            raise part
        return part

    def _unpacked(self, data: Any) -> tuple[Any, Any, Any]:
        inputs, targets, sample_weight = unpacked(data)
        if self._class_weight is not None:
            if sample_weight is not None:
                raise UserError("give class_weight, or sample weights in the batches of x, not both")
            sample_weight = weights_of_classes(targets, self._class_weight)
        return inputs, targets, sample_weight

    def _parts(self, data: tuple[Any, Any, Any], first: int) -> list[Batch]:
        """Cuts a global batch for each process. `first`: index of its first row in the data set."""
        self._notice_shapes(data[0])
        _, num_shards = self.shard
        if num_shards == 1:
            return [batch_of(data, self.split, (0, 1), first)] * self._num_processes
        shards = range(num_shards) if self._scatter is not None else [self.shard[0]]
        return [batch_of(data, self.split, (rank, num_shards), first) for rank in shards]

    def _notice_shapes(self, inputs: Any) -> None:
        shape = tuple(leaf.shape[1:] for leaf in keras.tree.flatten(inputs) if leaf is not None)
        if shape in self._shapes or len(self._shapes) >= _MANY_SHAPES:
            return
        self._shapes.add(shape)
        if len(self._shapes) == _MANY_SHAPES:
            self.warn(
                f"the inputs have come in {_MANY_SHAPES} shapes, {shape[0]} the last, and a compiled step is compiled "
                "anew for each: pad to a few lengths, with keras.utils.pad_sequences or, in batches of similar "
                "length, kerasdp.Buckets"
            )


class IndexedReader(BatchReader):
    """Batches of a `keras.utils.PyDataset`, by number, in the run's order, with its threads or processes."""

    def __init__(self, batches: keras.utils.PyDataset, *args: Any, order_seed: int | None = None, **kwargs: Any):
        """`order_seed` shuffles the batches; None keeps their order. The others: as in `BatchReader`.

        Raises:
            UserError: if there is no number of batches.
        """
        super().__init__(batches, *args, **kwargs)
        length = batches.num_batches or self._steps
        if length is None:
            raise UserError(f"x: the {type(batches).__name__} has no number of batches; add steps_per_epoch")
        self._order = Order(
            num_samples=length,
            batch_size=1,
            seed=order_seed or 0,
            shuffle=order_seed is not None and batches.num_batches is not None,
            steps_per_epoch=self._steps,
        )
        self.num_batches, self.num_threads = self._order.num_batches, max(1, batches.workers)
        self._pool: ProcessPoolExecutor | None = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """See `BatchReader`."""
        self.batches.on_epoch_begin()
        indices: Iterator[int] = (int(index) for (index,) in self._order.batches(epoch, start))
        if self.batches.num_batches is None:  # each batch has a number of its own
            indices = itertools.count(epoch * self._order.num_batches + start)
        if self._reads and self.batches.use_multiprocessing:
            # Forked, as Keras does, and anew for each epoch: `on_epoch_end` changes this process's data set.
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self.num_threads, context, _keep, (self.batches,))
            self._pool.submit(_nothing).result()  # forks all of them, in this thread, with which they may end
        for number, index in zip(range(start, self._order.num_batches), indices):
            yield functools.partial(self._read, index, number)

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:
        """See `BatchReader`."""
        for _ in range(epoch):
            self.batches.on_epoch_begin()
            self.batches.on_epoch_end()

    def end_epoch(self, number: int) -> None:
        """See `BatchReader`."""
        super().end_epoch(number)
        if self._pool is not None:
            self._pool.shutdown()
        if number == self.num_batches:  # not before its last batch was read: it may shuffle
            self.batches.on_epoch_end()

    def _look(self) -> Any:
        return self.batches[0]

    def _read(self, index: int, number: int) -> Batch | None:
        def read() -> Any:
            return self.batches[index] if self._pool is None else self._pool.submit(_batch, index).result()

        def cut(data: Any) -> list[Batch]:
            return self._parts(data, number * len(self.first().indices))

        self.first()
        return self._handed_out(read, cut, number + 1)


# Of a process that reads for this one: its data set.
_own: list[keras.utils.PyDataset] = []


def _keep(batches: keras.utils.PyDataset) -> None:
    # Else a run that fails leaves it, and with it what it inherited of open pipes. On Linux it ends with the thread
    # that forked it.
    end_with_parent()
    _own[:] = [batches]


def _nothing() -> None:
    pass


def _batch(index: int) -> Any:
    return _own[0][index]
