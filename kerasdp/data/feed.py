"""Brings batches to the devices: reads ahead in threads."""

import collections
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any

from kerasdp.data.batch import Batch, SampleReader
from kerasdp.data.batch_reader import BatchReader
from kerasdp.runtime.run_state import RunState

Reader = SampleReader | BatchReader


class Feed:
    """The batches of the epoch that is running, read and brought to the devices ahead of their use."""

    def __init__(
        self,
        reader: Reader,
        shard_batch: Callable[[Batch], Any],
        run_state: RunState | None = None,
        begin_thread: Callable[[], None] = lambda: None,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """Reads whatever epoch `run_state` says, without the batches before a resume point; None: always the first.

        `shard_batch` brings a batch to this process's devices; it is called in the reading threads, each of which
        calls `begin_thread` before it reads; each batch is read in a context that `reading` gives.
        """
        self.reader, self.shard_batch, self._begin_thread, self._reading = reader, shard_batch, begin_thread, reading
        self.num_batches = reader.num_batches
        self.run_state = RunState() if run_state is None else run_state
        self._running: Generator[Any, None, None] | None = None
        self._is_left_in_order = False

    def __iter__(self) -> Iterator[Any]:
        self.close()
        self._running = self._batches()
        return self._running

    def close(self) -> None:
        """Leaves the epoch that is running, on all processes after the same batch."""
        self._is_left_in_order = True
        if self._running is not None:
            self._running.close()
        self._running, self._is_left_in_order = None, False

    def _batches(self) -> Generator[Any, None, None]:
        start = self.run_state.num_skipped
        threads, number = _Threads(self.reader.num_threads, self._begin_thread), start
        ahead: collections.deque[Future[Any]] = collections.deque()
        try:
            reads = enumerate(self.reader.epoch(self.run_state.epoch, start), start)
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
        with self._reading():
            batch = read()
        if batch is None:
            return None
        if self.reader.check is not None:
            self.reader.check(batch, number)
        return self.shard_batch(batch)


class _Threads:
    """Calls functions in threads that end with the program, even where one waits for a process that has failed.

    The threads of `concurrent.futures` and their work are awaited at a program's end (Python 3.11 to 3.14).
    """

    def __init__(self, count: int, begin: Callable[[], None]):
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._begin = begin
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
        is_begun = False
        while (task := self._tasks.get()) is not None:
            future, function, args = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if not is_begun:
                    self._begin()
                is_begun = True
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
