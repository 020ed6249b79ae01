"""Defines what one process sees of a step's data, reads it from samples, and brings it to the devices.

Batches that come ready-made are read in `batch_reader.py`.
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


def batch_of(data: tuple[Any, Any, Any], split: Split, first: int = 0) -> Batch:
    """Returns what a process sees of a global batch.

    Args:
        data: inputs, targets and sample weights of the global batch, in NumPy.
        split: over all replicas.
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
    """The batches of a data set, as this process sees them.

    Attributes:
        split: of a batch over all replicas.
        num_batches: of an epoch; None if the data does not tell.
        num_threads: that read at once, ahead of the training. 0: a batch is read when the training takes it, as of
            samples in memory, which draw nothing and have no end of an epoch.
        name: of the data set, if it has one.
        check: looks at each batch that is read for a feed, if there is one.
        hands_out: whether batches come from another process, so that all processes must take equally many.
    """

    split: Split
    num_batches: int | None
    num_threads = 1
    name = ""
    check: BatchCheck | None = None
    hands_out = False

    @abc.abstractmethod
    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """Yields a function per batch, from batch `start` on, that reads it; to be called in any order, in threads.

        It returns None when there are no more. `end_epoch` is to be called when nothing is read any more.
        """

    @abc.abstractmethod
    def first(self) -> Batch:
        """Returns the first batch, for its shapes; it will come again."""

    @abc.abstractmethod
    def sample(self, num_rows: int) -> Any:
        """Returns so many rows of the first batch, the same in each process: inputs, targets, sample weights.

        A batch of fewer rows is repeated.
        """

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:  # noqa: B027
        """Lets the data prepare for a batch as if those before it had been trained on.

        Args:
            epoch: of the batch.
            batch: its number.
            saved: what `saved_state` gave for that place.
        """

    def saved_state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """Returns, in JSON, what `resume_at` needs to continue with a batch; None if that is nothing."""
        return None

    def end_epoch(self, number: int) -> None:  # noqa: B027
        """Ends an epoch of which the batches before `number` were taken."""


class SampleReader(Reader):
    """Batches of a source that can be read sample by sample (see `kerasdp.data.sources.Source`), in any order."""

    num_batches: int

    def __init__(self, source: Any, order: Order, split: Split, is_kept: bool = False):
        """`is_kept`: the source's arrays stay on the devices."""
        self._kept = DeviceCache(in_floatx(as_arrays(source.arrays))) if is_kept else None
        self.source, self.order, self.split = source, order, split
        self.num_batches = order.num_batches
        self.num_threads = source.num_threads
        self.name = getattr(source, "name", "")

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch]]:
        """See `Reader`."""
        for indices in self.order.batches(epoch, start):
            yield functools.partial(self._read, indices, self._kept)

    def first(self) -> Batch:
        """See `Reader`."""
        return self._read(self.order.batch(0, 0), None)

    def sample(self, num_rows: int) -> Any:
        """See `Reader`."""
        rows = np.resize(self.order.batch(0, 0), num_rows)
        return self.source.inputs(rows), *self.source.targets(rows)

    def _read(self, indices: np.ndarray, kept: DeviceCache | None) -> Batch:
        rows = indices[self.split.rows_of_process(len(indices))]
        targets, sample_weight = self.source.targets(rows)
        inputs = self.source.inputs(rows) if kept is None else CachedRows(kept=kept, numbers=rows.astype("int32"))
        return Batch(inputs=inputs, targets=targets, sample_weight=sample_weight, indices=indices, own_indices=rows)


class Feed:
    """The batches of the epoch that is running, read and brought to the devices ahead of their use."""

    def __init__(
        self,
        reader: Reader,
        shard_batch: Callable[[Batch], Any],
        run_state: RunState | None = None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Reads whatever epoch `run_state` says, without the batches before a resume point; None: always the first.

        `shard_batch` brings a batch to this process's devices; it is called in the reading threads, if there are any.
        These read in a context that `reading` gives.
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
        """Leaves the epoch that is running, on all processes after the same batch."""
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
            # If one process hands out the batches, all have asked for equally many and receive them: none is cancelled.
            # After a failure they may never come, so nothing waits for them.
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
    """Calls functions in threads that end with the program, even where one waits for a process that has failed.

    The threads of `concurrent.futures` and their work are awaited at a program's end (Python 3.11 to 3.14).
    """

    def __init__(self, count: int):
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._threads = [Thread(target=self._work, daemon=True, name="reading") for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Has a function called in the next thread that is free; the future gives its result."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, args))
        return future

    def close(self) -> None:
        """Lets the threads end after what they were given."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Waits until they have ended."""
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
