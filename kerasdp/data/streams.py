"""Reads batches sequentially from objects that control their own order, such as generators."""

import collections
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.data.batch import Batch
from kerasdp.data.batch_reader import END, BatchReader
from kerasdp.data.sources import digest_of
from kerasdp.errors import UserError

# Length of an infinite data set in tf.data, and of a repeated data set in Grain.
_NO_END, _GRAIN_NO_END = -1, sys.maxsize
# Number of elements of each array, evenly spaced, in the digest of a batch.
_MOST_DIGESTED = 512


class Stream:
    """Iterates over batches, with methods to look at the next batch and to put batches back."""

    def __init__(self, batches: Any):
        self._iterator = iter(batches)
        self._waiting: collections.deque[Any] = collections.deque()

    def peek(self) -> Any:
        """Returns the next batch without removing it; `END` if there is no next batch."""
        if not self._waiting:
            self._waiting.append(next(self._iterator, END))
        return self._waiting[0]

    def take(self) -> Any:
        """Returns the next batch and removes it; `END` if there is no next batch."""
        return self._waiting.popleft() if self._waiting else next(self._iterator, END)

    def give_back(self, batches: list[Any]) -> None:
        """Puts batches back at the front of the stream."""
        self._waiting.extendleft(reversed(batches))


def kind_of(batches: Any) -> str:
    """Returns the name of the object's type, for messages."""
    return "tf.data.Dataset" if type(batches).__module__.startswith("tensorflow.") else type(batches).__name__


def length_of(batches: Any) -> int | None:
    """Returns the number of batches that an object yields; None if not known.

    Raises:
        UserError: if the object reports that it is infinite.
    """
    length: int | None = None
    if hasattr(batches, "cardinality"):  # tf.data: negative where it is infinite or unknown
        length = int(batches.cardinality())
    elif hasattr(batches, "__len__"):
        try:
            length = len(batches)
        except TypeError:  # a DataLoader over an IterableDataset that has no length
            return None
    if length in (_NO_END, _GRAIN_NO_END):
        raise UserError(f"x: the {kind_of(batches)} is infinite; add steps_per_epoch")
    return length if length is None or length >= 0 else None


def seed_pass(batches: Any, seed: int, number: int) -> None:
    """Seeds a pass over the data, so that the order of the batches depends only on the run's seed and the pass.

    Sets the global seeds of Python, NumPy and torch. Seeds the generators of a torch DataLoader and its samplers. Calls
    `set_epoch` of objects that have this method.

    Args:
        batches: the data; a pass over the data is about to start.
        seed: seed of the run.
        number: index of the pass, from 0.
    """
    words = np.random.SeedSequence([seed % 2**64, number]).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[0]))
    samplers = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    samplers.append(getattr(samplers[1], "sampler", None))
    for part in (batches, *samplers):
        if hasattr(part, "set_epoch"):
            part.set_epoch(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int(words[1]))
        for part in (batches, *samplers):
            if getattr(part, "generator", None) is not None:
                part.generator.manual_seed(int(words[1]))


def skip_passes(batches: Any, count: int) -> None:
    """Advances the random state of the data as if `count` more passes had been read.

    tf.data (2.21) shuffles when the iterator of a pass is made. Other objects may shuffle when they yield the first
    batch, so this function reads the first batch. It does nothing for a DataLoader, since `seed_pass` seeds each pass.
    """
    torch = sys.modules.get("torch")
    for _ in range(0 if torch is not None and isinstance(batches, torch.utils.data.DataLoader) else count):
        iterator = iter(batches)
        if not hasattr(batches, "cardinality"):
            next(iterator, None)


def refuse_split_data(batches: Any) -> None:
    """Raises `UserError` for a DataLoader that reads only one shard of the samples in each process.

    The data must contain all samples, because kerasdp itself splits each batch.
    """
    sampler: Any = getattr(batches, "sampler", None)
    if type(sampler).__name__ == "DistributedSampler" and sampler.num_replicas > 1:
        raise UserError(
            "x: a DataLoader with a DistributedSampler yields only a shard of the samples, but kerasdp splits each "
            "batch itself; remove the sampler (use shuffle=True)"
        )


def _digest_of(data: Any) -> str:
    """Returns a digest of some elements of each array of a batch, to recognize the batch later."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    return digest_of(leaf.reshape(-1)[:: 1 + leaf.size // _MOST_DIGESTED] for leaf in leaves)


# Batches that may be read, but not yet trained (`steps_per_execution`), when a checkpoint is written.
_MOST_AHEAD = 256


class StreamReader(BatchReader):
    """Reads batches from any iterable, in the order of the iterable.

    By default, each epoch reads the data from the start. Two kinds of data continue where the previous epoch ended:
    - an iterator, which can be read only once
    - training data, if `steps` sets the number of batches of an epoch
    """

    def __init__(
        self,
        batches: Any,
        *args: Any,
        seed: int | None = None,
        known_streams: dict[int, Stream] | None = None,
        **kwargs: Any,
    ):
        """Makes the reader of this process.

        Args:
            batches: an iterable of batches.
            *args: see `BatchReader`.
            seed: seed that makes the shuffling of the data repeatable, in training; None in an evaluation.
            known_streams: streams of iterators that can be read only once, by the `id` of the iterator. A stream holds
                the batches that an earlier call read but did not use.
            **kwargs: see `BatchReader`.

        Raises:
            UserError: if the data is infinite and `steps` is None, or the data is already split over the processes.
        """
        super().__init__(batches, *args, **kwargs)
        refuse_split_data(batches)
        self._seed, self._is_read_once = seed, hasattr(batches, "__next__")  # it is an iterator, such as a generator
        self._continues = self._is_read_once or (self._steps is not None and seed is not None)
        self._stream: Stream | None = None  # where this process reads
        if self._is_read_once and self._reads:
            known = {} if known_streams is None else known_streams
            self._stream = known.setdefault(id(batches), Stream(batches))
        self.num_batches = self._steps or length_of(batches)
        if self._scatter is not None:
            self.num_batches = self._scatter([self.num_batches] * self._num_processes, 0)
        # The pass that was opened last; whether all of its batches are still there; the number of batches taken since
        # then (in the whole run, if an epoch continues the last one); the number of their rows.
        self._pass, self._is_fresh, self._num_taken, self._rows = -1, False, 0, 0
        self._is_over = False
        self._resumed_with: dict[str, Any] | None = None
        self._read_last: list[tuple[int, Any]] = []
        self._digests: dict[int, str] = {}

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """Yields, for each batch, a function that reads the batch; see `Reader.epoch`."""
        if not self._continues and not (self._is_fresh and self._pass == epoch):
            self._open(epoch)
        elif not self._is_read_once and self._pass < 0:
            self._open(0)
        self._is_fresh = self._is_over = False
        self._read_last.clear()
        self._drop_before(self._place(epoch, start))
        for number in itertools.count(start) if self.num_batches is None else range(start, self.num_batches):
            yield functools.partial(self._read, epoch, number)

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:
        """Skips the batches before the resume point; see `Reader.resume_at`."""
        self._resumed_with = saved or {}
        if self._continues:
            if not self._is_read_once and self._pass < 0:
                self._open(0)
            self._drop_before(self._place(epoch, batch))
        elif self._reads and epoch:
            skip_passes(self.batches, epoch - 1)  # the first pass was opened to read its first batch
            self._is_fresh = False

    def saved_state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """Returns a digest of the last batch before this position.

        A resumed run uses the digest to check that the data yields the same batch. See `Reader.saved_state`.
        """
        digest = self._digests.get(self._place(epoch, batch))
        return None if digest is None else {"digest": digest}

    def end_epoch(self, number: int) -> None:
        """Ends an epoch; see `Reader.end_epoch`.

        If the data is an iterator that can be read only once, puts back the batches that were read but not used.
        """
        if self._is_read_once and self._stream is not None:
            self._stream.give_back([data for place, data in self._read_last if place >= number])
        self._read_last.clear()

    def _place(self, epoch: int, batch: int) -> int:
        """Returns the number of batches before batch `batch` of epoch `epoch`.

        Counts from the start of the run if each epoch continues the previous epoch, otherwise from the start of the
        epoch.
        """
        return epoch * (self._steps or 0) + batch if self._continues else batch

    def _look(self) -> Any:
        if self._stream is None:
            self._open(0)
        return self._stream.peek() if self._stream else END

    def _open(self, number: int) -> None:
        """Starts pass `number` over the data. Each process calls this method."""
        if self._seed is not None:
            seed_pass(self.batches if self._reads else (), self._seed, number)
        if self._reads:
            self._stream = Stream(self.batches)
        self._pass, self._is_fresh = number, True
        if not self._continues:
            self._num_taken = self._rows = 0

    def _read(self, epoch: int, number: int) -> Batch | None:
        if self._is_over:
            return None
        place, rows_before = self._place(epoch, number), self._rows

        def read() -> Any:
            data = self._take()
            if data is END:
                self._require_some(number)
            else:
                self._read_last = [*self._read_last[-3:], (number, data)]  # a feed reads three ahead
            return data

        def cut(data: Any) -> list[Batch]:
            parts = self._parts(data, rows_before)
            self._rows += len(parts[0].indices)
            self._digests[place + 1] = _digest_of(data)
            self._digests.pop(place + 1 - _MOST_AHEAD, None)
            return parts

        batch = self._handed_out(read, cut, number + 1)
        self._is_over = batch is None
        self._num_taken += batch is not None
        return batch

    def _take(self) -> Any:
        data = self._stream.take() if self._stream else END
        # In training, an epoch with more batches than the data continues with the next pass, as with arrays.
        if data is END and self._steps and self._seed is not None and not self._is_read_once:
            self._open(self._pass + 1)
            data = self._stream.take() if self._stream else END
        return data

    def _require_some(self, number: int) -> None:
        """Raises `UserError` if a new epoch begins, but an iterator that can be read only once has no more batches."""
        if self._is_read_once and self._num_taken and not number:
            raise UserError(
                f"x: the {kind_of(self.batches)} is exhausted after {self._num_taken} batches, since it can be read "
                "only once; add steps_per_epoch (or validation_steps), or pass an object that can be iterated again"
            )

    def _drop_before(self, place: int) -> None:
        """Reads the batches before the resume point again, and discards them."""
        missing: int = place - self._num_taken
        data: Any = None
        for _ in range(missing if self._reads else 0):
            if (data := self._take()) is END:
                break
            self._rows += len(keras.tree.flatten(data)[0])
        self._num_taken = max(self._num_taken, place)
        if data is None or data is END or self._resumed_with is None:
            return
        is_other = self._resumed_with.get("digest") not in (None, _digest_of(self._unpacked(data)))
        end = ". The last of these differs from the batch before the checkpoint; seed the shuffling" if is_other else ""
        self.warn(f"--resume: {missing} batches of the {kind_of(self.batches)} were read again and skipped{end}")
        self._resumed_with = None
