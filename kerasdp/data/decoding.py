"""Decodes records in processes of their own. Loads neither Keras nor a framework, nor do these processes."""

import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cloudpickle

from kerasdp.errors import UserError, WorkerError
from kerasdp.runtime.sending import not_run_again

Decode = Callable[[Any], Any]


def decoded(decode: Decode, indices: list[int], records: list[Any]) -> list[Any]:
    """Returns what `decode` makes of each record; an error says the index of its record."""
    samples = []
    for index, record in zip(indices, records):
        try:
            samples.append(decode(record))
        except Exception as error:
            error.add_note(f"in decode, of record {index}")
            raise
    return samples


class DecodingProcesses:
    """Processes that decode records; to be used from any thread. They end with this process, however that ends.

    They are spawned, not forked: libraries that read in threads of their own (ArrayRecord's, Arrow) do not survive a
    fork. They get the function as its code where it is of the script.
    """

    def __init__(self, decode: Decode, count: int):
        """Starts them with the first records.

        Raises:
            UserError: if `decode` refers to what cannot be sent.
        """
        try:
            sent = cloudpickle.dumps(decode)
        except Exception as error:
            raise UserError(
                f"decode: cannot be sent to the num_workers processes ({error}); use num_workers=0"
            ) from None
        self.count = count
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin, (sent,))
        # At its end a rank waits for the processes that it started, once it has closed the queues (priority 10) by
        # which they would hear of that.
        multiprocessing.util.Finalize(None, self._pool.shutdown, exitpriority=100)

    def __call__(self, indices: list[int], records: list[Any]) -> list[Any]:
        """Returns what `decode` makes of each record, in order.

        Raises:
            WorkerError: if a process ended.
        """
        size = -(-len(indices) // self.count)
        parts = [slice(first, first + size) for first in range(0, len(indices), size)]
        try:
            with not_run_again():  # processes are started when they are needed
                tasks = [self._pool.submit(_decoded, indices[part], records[part]) for part in parts]
            return list(itertools.chain.from_iterable(task.result() for task in tasks))
        except BrokenProcessPool as error:
            raise WorkerError(f"a process that decodes records failed ({error}); maybe for want of memory") from error

    def close(self) -> None:
        """Lets them end; does not wait for them, since any thread may come to call it."""
        self._pool.shutdown(wait=False)


# In a process that decodes: its function.
_own: list[Decode] = []


def _begin(sent: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes, and one of them says so
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _own[:] = [cloudpickle.loads(sent)]


def _end_with_parent() -> None:
    # Not by the system, as elsewhere: its signal comes when the thread that started the process ends.
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _decoded(indices: list[int], records: list[Any]) -> list[Any]:
    return decoded(_own[0], indices, records)
