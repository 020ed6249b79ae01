"""Defines `Batch`, the rows of one process in a global batch. Reads batches from samples, and copies them to devices.

`batch_reader.py` reads data that already consists of batches.
"""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from kerasdp.data.sampling import CachedRows, DeviceCache, Order, Split
from kerasdp.data.sources import as_arrays, in_floatx, num_samples, take_rows
from kerasdp.run_state import RunState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Holds the data of one step for one process, in NumPy.

    Args:
        inputs: inputs of the rows of this process's replicas, one replica after the other: an array, a structure of
            arrays, or `CachedRows`. Padding repeats the last row of the batch; see `Split`.
        targets: targets of these rows; None if there are no targets.
        sample_weight: sample weights of these rows; None if there are no weights.
        indices: index in the data set of each row of the global batch, int64, shape `(rows,)`. `len(indices)` is the
            number of rows without padding.
        own_indices: index in the data set of each row of this process.
    """

    inputs: Any
    targets: Any
    sample_weight: Any
    indices: np.ndarray
    own_indices: np.ndarray


# Called with a batch and its number in the epoch. Raises `UserError` if a model cannot learn from the batch.
BatchCheck = Callable[[Batch, int], None]


def batch_of(data: tuple[Any, Any, Any], split: Split, first: int = 0) -> Batch:
    """Returns this process's rows of a global batch, as a `Batch`.

    Args:
        data: inputs, targets and sample weights of the global batch, in NumPy.
        split: how the batch is split over all replicas.
        first: index of the batch's first row in the data set.
    """
    num_rows = num_samples(data)
    rows = split.rows_of_process(num_rows)
    inputs, targets, sample_weight = take_rows(data, rows)
    return Batch(
        inputs=inputs,
        targets=targets,
        sample_weight=sample_weight,
        indices=np.arange(first, first + num_rows),
        own_indices=first + rows,
    )


class Reader(abc.ABC):
    """Reads the batches of a data set for this process. Base class of all readers.

    Attributes:
        split: how each batch is split over all replicas.
        num_batches: number of batches of an epoch; None if not known.
        num_threads: number of threads that read batches before the training needs them. 0: a batch is read when the
            training needs it. Only samples in memory may use 0, because reading them draws no random numbers and needs
            no action at the end of an epoch.
        name: name of the data set, or an empty string.
        check: function that checks each batch of a feed, or None.
        hands_out: whether one process reads for all processes. Then all processes must take the same number of
            batches.
    """

    split: Split
    num_batches: int | None
    num_threads = 1
    name = ""
    check: BatchCheck | None = None
    hands_out = False

    @abc.abstractmethod
    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """Yields a function for each batch of an epoch, from batch `start` on. The function reads the batch.

        The functions may be called in threads, in any order. A function returns None if the data ended before its
        batch. Call `end_epoch` after all functions have returned.
        """

    @abc.abstractmethod
    def first(self) -> Batch:
        """Returns the first batch, which shows the shapes of the data. The first epoch reads this batch again."""

    @abc.abstractmethod
    def sample(self, num_rows: int) -> Any:
        """Returns inputs, targets and sample weights of `num_rows` rows of the first batch.

        The rows are the same in each process. Rows repeat if the batch has fewer than `num_rows` rows.
        """

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:  # noqa: B027
        """Moves the data to the batch at which a run resumes.

        Afterwards, the data is in the same state as if the run had read all batches before this batch.

        Args:
            epoch: epoch of the batch.
            batch: index of the batch in its epoch.
            saved: the result of `saved_state` for this position.
        """

    def saved_state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """Returns the JSON values that `resume_at` needs to resume at a batch; None if it needs no values."""
        return None

    def end_epoch(self, number: int) -> None:  # noqa: B027
        """Ends the current epoch. `number` is the number of batches that the epoch used."""


class SampleReader(Reader):
    """Reads batches from a source that reads samples by index; see `kerasdp.data.sources.Source`."""

    num_batches: int

    def __init__(self, source: Any, order: Order, split: Split, is_kept: bool = False):
        """Makes the reader. If `is_kept` is True, the devices cache the source's arrays."""
        self._kept = DeviceCache(in_floatx(as_arrays(source.arrays))) if is_kept else None
        self.source, self.order, self.split = source, order, split
        self.num_batches = order.num_batches
        self.num_threads = source.num_threads
        self.name = getattr(source, "name", "")

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch]]:
        """Yields, for each batch, a function that reads the batch; see `Reader.epoch`."""
        for indices in self.order.batches(epoch, start):
            yield functools.partial(self._read, indices, self._kept)

    def first(self) -> Batch:
        """Returns the first batch; see `Reader.first`."""
        return self._read(self.order.batch(0, 0), None)

    def sample(self, num_rows: int) -> Any:
        """Returns `num_rows` rows of the first batch; see `Reader.sample`."""
        rows = np.resize(self.order.batch(0, 0), num_rows)
        return self.source.inputs(rows), *self.source.targets(rows)

    def _read(self, indices: np.ndarray, kept: DeviceCache | None) -> Batch:
        rows = indices[self.split.rows_of_process(len(indices))]
        targets, sample_weight = self.source.targets(rows)
        inputs = self.source.inputs(rows) if kept is None else CachedRows(kept=kept, numbers=rows.astype("int32"))
        return Batch(inputs=inputs, targets=targets, sample_weight=sample_weight, indices=indices, own_indices=rows)


class Feed:
    """Iterates over the batches of the current epoch.

    Reads batches before they are needed, and copies the batches to the devices.
    """

    def __init__(
        self,
        reader: Reader,
        shard_batch: Callable[[Batch], Any],
        run_state: RunState | None = None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Creates a feed. The feed reads no batches before the first iteration.

        Args:
            reader: reader of the batches.
            shard_batch: function that copies a batch to this process's devices. If there are reading threads, these
                threads call the function.
            run_state: state of the run. The feed reads the current epoch of the run, and skips the batches before a
                resume point. None: the feed always reads the first epoch.
            reading: function that returns a context manager. A reading thread enters it to read a batch.
        """
        self.reader, self.shard_batch, self._reading = reader, shard_batch, reading
        self.num_batches = reader.num_batches
        self.run_state = RunState() if run_state is None else run_state
        self._running: Generator[Any, None, None] | None = None
        self._is_left_in_order = False

    def __iter__(self) -> Iterator[Any]:
        self.close()
        start, is_ahead = self.run_state.num_skipped, self.reader.num_threads > 0
        reads = enumerate(self.reader.epoch(self.run_state.epoch, start), start)
        self._running = self._ahead(reads, start) if is_ahead else (self._read_and_shard(*task) for task in reads)
        return self._running

    def close(self) -> None:
        """Ends the current epoch. All processes must call this method after the same number of batches."""
        self._is_left_in_order = True
        if self._running is not None:
            self._running.close()
        self._running, self._is_left_in_order = None, False

    def _ahead(self, reads: Iterator[Any], number: int) -> Generator[Any, None, None]:
        threads = _Threads(self.reader.num_threads)
        ahead: collections.deque[Future[Any]] = collections.deque()
        try:
            while True:
                while len(ahead) <= 2 * self.reader.num_threads and (task := next(reads, None)) is not None:
                    ahead.append(threads.submit(self._read_and_shard, *task))
                batch = ahead.popleft().result() if ahead else None
                if batch is None:
                    break
                number += 1
                yield batch
            self._is_left_in_order = True
        finally:
            # If one process reads for all, each process has requested the same number of batches and receives them.
            # So no request is cancelled. After a failure batches may never come, so nothing waits for them.
            if not self.reader.hands_out:
                for future in ahead:
                    future.cancel()
            threads.close()
            if not self.reader.hands_out or self._is_left_in_order:
                threads.join()
                self.reader.end_epoch(number)

    def _read_and_shard(self, number: int, read: Callable[[], Batch | None]) -> Any:
        with self._reading() if self.reader.num_threads else nullcontext():
            batch = read()
        if batch is not None and self.reader.check is not None:
            self.reader.check(batch, number)
        return None if batch is None else self.shard_batch(batch)


class _Threads:
    """Calls functions in daemon threads, which end with the program.

    So the program can end even if a thread waits for a process that has failed. `concurrent.futures` is not used: at
    the end of a program, Python (3.11 to 3.14) waits until the threads of `concurrent.futures` have finished.
    """

    def __init__(self, count: int):
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._threads = [Thread(target=self._work, daemon=True, name="reading") for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a function in the next free thread. Returns a future for its result."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, args))
        return future

    def close(self) -> None:
        """Makes the threads end after they have finished the submitted work."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Waits until all threads have ended."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function, args = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
