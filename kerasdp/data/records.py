"""Reads records by their numbers from libraries that know their files, and decodes them, in processes if asked to."""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from kerasdp.data.decoding import DecodingProcesses, decoded
from kerasdp.data.sources import as_arrays
from kerasdp.errors import UserError


class RecordSource:
    """Samples of what gives records by their numbers: a map-style data set of torch, a data source of Grain, a list.

    Args:
        records: `len(records)` and `records[7]` are asked for; where there is a `__getitems__`, as in torch and Grain,
            it reads several at once.
        decode: makes `(inputs, targets)`, `(inputs, targets, sample_weight)` or inputs alone of a record: arrays or
            numbers without a batch axis, or structures of such. None: the records are that.
        num_threads: of this process that read at once.
        num_workers: processes that decode what this one reads, for a `decode` that is slow Python; 0: its threads do
            it. Where reading is slow Python, too: `RecordSource(range(len(data)), data.__getitem__, num_workers=4)`.

    Raises:
        UserError: if there are no records, or `num_workers` without `decode`.
    """

    name = ""

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
        if num_workers and decode is None:
            raise UserError(f"num_workers: expected 0 without decode. Received: {num_workers}; leave it out")
        self._records, self._decode, self._num_workers = records, decode, num_workers
        # What each thread read last: inputs and targets of a batch are asked for one after the other.
        self._last = threading.local()
        self._pool: DecodingProcesses | None = None
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
        """Returns inputs, targets and sample weight of each of these records."""
        if not indices:
            return []
        several = hasattr(self._records, "__getitems__")
        samples = self._records.__getitems__(indices) if several else [self._records[index] for index in indices]
        if self._decode is not None:
            decode = self._processes() or functools.partial(decoded, self._decode)
            samples = decode(indices, list(samples))
        return [keras.utils.unpack_x_y_sample_weight(sample) for sample in samples]

    def _processes(self) -> DecodingProcesses | None:
        with self._lock:
            if self._num_workers and self._decode is not None and self._pool is None:
                self._pool = DecodingProcesses(self._decode, self._num_workers)
                weakref.finalize(self, self._pool.close)
            return self._pool


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
