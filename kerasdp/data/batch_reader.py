"""Reads batches that come ready-made: by number (PyDataset), or in turn (tf.data, DataLoaders, generators, Grain).

One process reads and hands out: an object that each process read by itself might give each of them other batches.
"""

import abc
import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import keras
import numpy as np

from kerasdp.data import streams
from kerasdp.data.batch import Batch, Reader, batch_of
from kerasdp.data.sampling import Order, Split
from kerasdp.data.sources import num_samples, take_rows, weights_of_classes
from kerasdp.data.streams import END, Item, Stream, unpacked
from kerasdp.errors import UserError, WorkerError
from kerasdp.runtime.ranks import Scatter
from kerasdp.runtime.workers import end_with_parent

# Number of the messages about the first batch; those of an epoch's batches have the next ones.
_FIRST = 0
# So long the others wait when rank 0 could not read: its error has the frames, and the first one that is seen is shown.
_SECONDS_TO_RAISE = 1.0
# Shapes of inputs after which the reader says what they cost.
_MANY_SHAPES = 8


class BatchReader(Reader):
    """What the readers of ready-made batches share.

    Attributes:
        warn: prints a line about the data, where it is read.
    """

    def __init__(
        self,
        batches: Any,
        split: Split,
        shard: tuple[int, int],
        steps: int | None = None,
        *,
        class_weight: dict[int, float] | None = None,
        scatter: Scatter | None = None,
        warn: Callable[[str], None] = lambda line: None,
    ):
        """Makes the reader of this process.

        Args:
            batches: gives batches.
            split: see the attributes of `Reader`; so are `shard` and `warn`.
            steps: batches of an epoch; None: all there are.
            class_weight: weight of the samples of a class, for the loss.
            scatter: hands out what rank 0 reads; None: there is one process.
        """
        self.batches, self.split, self.shard, self.warn = batches, split, shard, warn
        self._steps, self._class_weight, self._scatter = steps, class_weight, scatter
        self.hands_out, self._reads = scatter is not None, scatter is None or scatter.rank == 0
        self._known_first: tuple[Any, Any, Any] | None = None
        self._shapes: set[Any] = set()

    def first(self) -> Batch:
        """See `Reader`."""
        return batch_of(self._first(), self.split, self.shard)

    def sample(self, num_rows: int) -> Any:
        """See `Reader`."""
        return take_rows(self._first(), np.resize(np.arange(num_samples(self._first())), num_rows))

    def first_targets(self) -> tuple[Any, Any]:
        """See `Reader`."""
        return self._first()[1:]

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
        part = self._scatter(parts, number)
        if error is not None:
            raise error
        if isinstance(part, Exception):
            if isinstance(part, WorkerError):
                time.sleep(_SECONDS_TO_RAISE)
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
        indices: Iterator[int] = (int(index) for (index,) in self._order.batches(epoch, start))
        if self.batches.num_batches is None:  # each batch has a number of its own
            indices = itertools.count(epoch * self._order.num_batches + start)
        if self._reads and self.batches.use_multiprocessing:
            # Forked, as Keras does, and again for each epoch: `on_epoch_end` changes this process's data set.
            context = multiprocessing.get_context("fork")
            self._pool = ProcessPoolExecutor(self.num_threads, context, _keep, (self.batches,))
            self._pool.submit(int).result()  # forks all of them, in this thread, with which they may end
        for number, index in zip(range(start, self._order.num_batches), indices):
            yield functools.partial(self._read, index, number)

    def resume_at(self, epoch: int, batch: int = 0, saved: dict[str, Any] | None = None) -> None:
        """See `Reader`."""
        for _ in range(epoch):
            self._begin()
            self.batches.on_epoch_end()
            self._held, self._is_begun = None, False

    def end_epoch(self, number: int) -> None:
        """See `Reader`."""
        self._held, self._is_begun = None, False
        if self._pool is not None:
            self._pool.shutdown()
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
            return self.batches[index] if self._pool is None else self._pool.submit(_batch, index).result()

        def cut(data: Any) -> list[Batch]:
            return self._parts(data, number * num_samples(self._first()))

        self._first()
        return self._handed_out(read, cut, number + 1)


# In a process that reads for this one: its data set.
_own: list[keras.utils.PyDataset] = []


def _keep(batches: keras.utils.PyDataset) -> None:
    # Else a run that fails leaves it, and with it what it inherited of open pipes. On Linux it ends with the thread
    # that forked it.
    end_with_parent()
    _own[:] = [batches]


def _batch(index: int) -> Any:
    return _own[0][index]


# So many batches may have been read, but not yet trained (`steps_per_execution`), when a checkpoint is written.
_MOST_AHEAD = 256


class StreamReader(BatchReader):
    """Batches of anything that can be iterated, in the order that it has.

    What can be read only once is read on and on, others from their begin in each epoch. In training, with `steps`
    batches an epoch, the next one continues where the last one ended. An evaluation begins with the first batch.
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
            batches: gives batches.
            *args: as in `BatchReader`.
            seed: for training: of the random numbers with which an object shuffles that has no seed of its own.
            known_streams: keeps what can be read only once, with what was read ahead of its use, by its `id`.
            **kwargs: as in `BatchReader`.

        Raises:
            UserError: if the batches have no end, or are only a part of those of the run.
        """
        super().__init__(batches, *args, **kwargs)
        streams.refuse_split_data(batches)
        self._seed, self._is_read_once = seed, streams.is_read_once(batches)
        self._continues = self._is_read_once or (self._steps is not None and seed is not None)
        self._stream: Stream | None = None  # where this process reads
        if self._is_read_once and self._reads:
            known = {} if known_streams is None else known_streams
            self._stream = known.setdefault(id(batches), Stream(batches))
        self.num_batches = self._steps or streams.length_of(batches)
        if self._scatter is not None:
            self.num_batches = self._scatter([self.num_batches] * self._num_processes, 0)
        # Pass that was opened last; whether nobody has taken a batch of it; batches taken since then (of the run, if an
        # epoch continues the last one), and their rows.
        self._pass, self._is_fresh, self._num_taken, self._rows = -1, False, 0, 0
        self._is_over = False
        self._resumed_with: dict[str, Any] | None = None
        self._read_last: list[tuple[int, Item]] = []
        self._records: dict[int, dict[str, Any]] = {}

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Callable[[], Batch | None]]:
        """See `Reader`."""
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
        """See `Reader`."""
        place = self._place(epoch, batch)
        self._resumed_with = saved or {}
        if saved and saved["state"] is not None and not self._is_read_once:
            self._open(epoch if not self._continues else saved["pass"], saved["state"])
            self._num_taken, self._rows = place, saved["rows"]
        elif self._continues:
            if not self._is_read_once and self._pass < 0:
                self._open(0)
            self._drop_before(place)
        elif self._reads and epoch:
            streams.skip_passes(self.batches, epoch - 1)  # the first one was opened for its first batch
            self._is_fresh = False

    def saved_state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """See `Reader`."""
        return self._records.get(self._place(epoch, batch))

    def end_epoch(self, number: int) -> None:
        """See `Reader`. Of an object that can be read only once, what was read ahead will come again."""
        items = [item for place, item in self._read_last if place >= number]
        if self._is_read_once and self._stream is not None:
            self._stream.give_back(items)
        self._read_last.clear()

    def _place(self, epoch: int, batch: int) -> int:
        """Returns how many batches are before one: of the run if an epoch continues the last one, else of its epoch."""
        return epoch * (self._steps or 0) + batch if self._continues else batch

    def _look(self) -> Any:
        if self._stream is None:
            self._open(0)
        return self._stream.peek() if self._stream else END

    def _open(self, number: int, state: Any = None) -> None:
        """Begins a pass over the data, in each process alike; with a state, after the batch of that state."""
        if self._seed is not None:
            streams.seed_pass(self.batches if self._reads else (), self._seed, number)
        if self._reads:
            self._stream = Stream(self.batches, state)
        self._pass, self._is_fresh = number, True
        if not self._continues:
            self._num_taken = self._rows = 0

    def _read(self, epoch: int, number: int) -> Batch | None:
        if self._is_over:
            return None
        place, rows_before = self._place(epoch, number), self._rows
        taken: list[Item] = []

        def read() -> Any:
            item = self._take()
            if item is END:
                self._require_some(number, epoch)
                return END
            taken.append(item)
            return item.data

        def cut(data: Any) -> list[Batch]:
            parts = self._parts(data, rows_before)
            self._rows += len(parts[0].indices)
            self._keep(place, number, taken[0], data)
            return parts

        batch = self._handed_out(read, cut, number + 1)
        self._is_over = batch is None
        self._num_taken += batch is not None
        return batch

    def _take(self) -> Any:
        item = self._stream.take() if self._stream else END
        # In training an epoch of more batches than there are continues with the next pass, as with arrays.
        if item is END and self._steps and self._seed is not None and not self._is_read_once:
            self._open(self._pass + 1)
            item = self._stream.take() if self._stream else END
        return item

    def _keep(self, place: int, number: int, item: Item, data: Any) -> None:
        """Keeps what may be asked for: the batches read last, and what a checkpoint needs of them."""
        self._read_last = [*self._read_last[-3:], (number, item)]  # a feed reads three ahead
        digest = streams.digest_of(data)
        self._records[place + 1] = {"pass": self._pass, "rows": self._rows, "digest": digest, "state": item.state}
        self._records.pop(place + 1 - _MOST_AHEAD, None)

    def _require_some(self, number: int, epoch: int) -> None:
        if number or not self._num_taken or not self._is_read_once:
            return
        left, steps = f" for epoch {epoch + 1}", "steps_per_epoch"
        if self._seed is None:
            left, steps = " to evaluate on", "validation_steps"
        raise UserError(
            f"x: the {streams.kind_of(self.batches)} gave {self._num_taken} batches, and has none left{left}: it can "
            f"be read only once; add {steps}, or give an object that can be iterated anew"
        )

    def _drop_before(self, place: int) -> None:
        """Reads the batches before a place again, which a run was trained on before it was resumed."""
        missing: int = place - self._num_taken
        item: Any = None
        for _ in range(missing if self._reads else 0):
            if (item := self._take()) is END:
                break
            self._rows += len(keras.tree.flatten(item.data)[0])
        self._num_taken = max(self._num_taken, place)
        if item is None or item is END or self._resumed_with is None:
            return
        is_other = self._resumed_with.get("digest") not in (None, streams.digest_of(self._unpacked(item.data)))
        end = "; the last is NOT the one of then: seed what shuffles, or the loss curve is another" if is_other else ""
        kind = streams.kind_of(self.batches)
        self.warn(
            f"--resume: no checkpoint holds the state of the {kind}: {missing} batches were read again and dropped{end}"
        )
        self._resumed_with = None
