"""Reads batches of tf.data, DataLoaders, generators, Grain and whatever else can be iterated."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from kerasdp.data import streams
from kerasdp.data.batch import Batch
from kerasdp.data.batch_reader import BatchReader
from kerasdp.data.streams import END, Item, Stream
from kerasdp.errors import UserError

# So many batches may have been read, but not yet trained (`steps_per_execution`), when a checkpoint is written.
_MOST_AHEAD = 256


class StreamReader(BatchReader):
    """Batches of anything that can be iterated, in the order that it has.

    What can be read only once is read on and on, others anew in each epoch; with `steps` batches an epoch, the next
    epoch continues where the last one ended.
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
        self._continues = self._is_read_once or self._steps is not None
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
        """See `BatchReader`."""
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
        """See `BatchReader`."""
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

    def saved_state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """See `BatchReader`."""
        return self._records.get(self._place(epoch, batch))

    def end_epoch(self, number: int) -> None:
        """See `BatchReader`. Of an object that can be read only once, what was read ahead will come again."""
        super().end_epoch(number)
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
        raise UserError(
            f"x: the {streams.kind_of(self.batches)} gave {self._num_taken} batches, and has none left for epoch "
            f"{epoch + 1}: it can be read only once; add steps_per_epoch, or give an object that can be iterated anew"
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
