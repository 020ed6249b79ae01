"""Reads records by their numbers from libraries that know their files, and decodes them, in processes if asked to."""

import multiprocessing
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import keras
import numpy as np

from kerasdp.data.sources import as_arrays
from kerasdp.errors import UserError, WorkerError
from kerasdp.runtime.processes import end_with_parent


class RecordSource:
    """Samples of what gives records by their numbers: a map-style data set of torch, a data source of Grain, a list.

    Args:
        records: `len(records)` and `records[7]` are asked for; where there is a `__getitems__`, as in torch and Grain,
            it reads several at once.
        decode: makes `(inputs, targets)`, `(inputs, targets, sample_weight)` or inputs alone of a record: arrays or
            numbers without a batch axis, or structures of such. None: the records are that.
        num_threads: of this process that read at once.
        num_workers: processes that read and decode, forked from this one, for a `decode` that is slow Python; 0: the
            threads do it.

    Raises:
        UserError: if there are no records.
    """

    def __init__(
        self,
        records: Any,
        decode: Callable[[Any], Any] | None = None,
        num_threads: int = 4,
        num_workers: int = 0,
    ):
        kind = type(records).__name__
        if not hasattr(records, "__getitem__") or not hasattr(records, "__len__"):
            raise UserError(
                f"expected records that can be read by their number. Received: a {kind} without __len__ and "
                "__getitem__; what is read in its own order goes to fit as it is, in batches"
            )
        self.num_samples, self.num_threads = len(records), num_threads
        if not self.num_samples:
            raise UserError(f"expected at least one record. Received: a {kind} without any")
        self._records, self._decode, self._num_workers = records, decode, num_workers
        # What each thread read last: inputs and targets of a batch are asked for one after the other.
        self._last = threading.local()
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self._records, self._decode, self.num_threads, self._num_workers)

    def inputs(self, indices: np.ndarray) -> Any:
        """See `kerasdp.data.sources.Source`."""
        return _stacked([inputs for inputs, _, _ in self._samples(indices)])

    def targets(self, indices: np.ndarray) -> tuple[Any, Any]:
        """See `kerasdp.data.sources.Source`."""
        samples = self._samples(indices)
        return _stacked([targets for _, targets, _ in samples]), _stacked([weight for _, _, weight in samples])

    def _samples(self, indices: np.ndarray) -> list[Any]:
        known = getattr(self._last, "samples", {})
        missing = [index for index in dict.fromkeys(indices.tolist()) if index not in known]
        samples = {index: known[index] for index in indices.tolist() if index in known}
        samples |= zip(missing, self._read(missing), strict=True)
        self._last.samples = samples
        return [samples[index] for index in indices.tolist()]

    def _read(self, indices: list[int]) -> list[Any]:
        if not self._num_workers or not indices:
            return _decoded(self._records, self._decode, indices)
        size = -(-len(indices) // self._num_workers)
        parts = [indices[first : first + size] for first in range(0, len(indices), size)]
        try:
            return [sample for part in self._workers().map(_read_in_worker, parts) for sample in part]
        except BrokenProcessPool as error:
            raise WorkerError(
                "a process that reads and decodes records was ended, maybe for want of memory; try fewer num_workers"
            ) from error

    def _workers(self) -> ProcessPoolExecutor:
        # Made at the first read, which is that of the first batch, by the thread that trains: workers end with the
        # thread that forked them. Records were not read before, so that none of their threads is lost in a worker.
        with self._lock:
            if self._pool is None:
                context = multiprocessing.get_context("fork")
                self._pool = ProcessPoolExecutor(self._num_workers, context, _keep, (self._records, self._decode))
                self._pool.submit(_read_in_worker, []).result()  # forks all of them
                weakref.finalize(self, self._pool.shutdown, wait=False)  # else Python (3.11) prints lines at its end
            return self._pool


def _decoded(records: Any, decode: Callable[[Any], Any] | None, indices: list[int]) -> list[Any]:
    """Returns inputs, targets and sample weight of each record."""
    if not indices:
        return []
    several = records.__getitems__(indices) if hasattr(records, "__getitems__") else map(records.__getitem__, indices)
    samples = []
    for index, record in zip(indices, several, strict=True):
        try:
            sample = record if decode is None else decode(record)
        except Exception as error:
            error.add_note(f"in decode, of record {index}")
            raise
        samples.append(keras.utils.unpack_x_y_sample_weight(sample))
    return samples


def _stacked(samples: Sequence[Any]) -> Any:
    """Returns the structure of one sample with arrays of all, with a batch axis; None if the first one is."""
    if samples[0] is None:
        return None
    try:
        stacked = keras.tree.map_structure(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *samples)
    except ValueError as error:
        raise UserError(
            f"records: expected samples of one structure and shape. Received: {error}; let `decode` crop or pad them"
        ) from error
    for leaf in keras.tree.flatten(stacked):
        if leaf.dtype.kind in "OSUV":
            raise UserError(
                f"records: expected numbers. Received: {leaf.dtype} in a sample; give `decode`, a function that makes "
                "(inputs, targets) of a record"
            )
    return as_arrays(stacked)


# Of a process that reads for this one: records, and how they are decoded.
_own: list[Any] = []


def _keep(records: Any, decode: Callable[[Any], Any] | None) -> None:
    end_with_parent()
    _own[:] = [records, decode]


def _read_in_worker(indices: list[int]) -> list[Any]:
    records, decode = _own
    return _decoded(records, decode, indices)
