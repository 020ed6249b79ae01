"""Chooses the reader for the data that a user passes to `fit`, `evaluate` or `predict`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from kerasdp.config import Config
from kerasdp.contract import Strategy
from kerasdp.data.batch import Batch, Feed, Reader, SampleReader
from kerasdp.data.batch_reader import IndexedReader
from kerasdp.data.sampling import Order, seed_of_fit
from kerasdp.data.sources import ArraySource, is_of_arrays, refuse_strings, weights_of_classes
from kerasdp.data.streams import Stream, StreamReader, length_of
from kerasdp.errors import UserError
from kerasdp.processes.devices import Devices
from kerasdp.reporting import report
from kerasdp.run_state import ModelCache, RunState
from kerasdp.same.random import DATA, portable_draws

# Inputs up to so many bytes are cached on each GPU by default.
MOST_ON_DEVICE = 2**30
# For batches up to so many bytes, a copy takes less time than to start it in a thread.
_FEW_BYTES = 2**20


class FitNumbers(ModelCache[int]):
    """Counts the calls of `fit` for each model, so that each new `fit` shuffles differently."""

    def next(self, model: keras.Model, initial_epoch: int) -> int:
        """Returns the number of a new call of `fit`, from 0.

        If the call starts at a later epoch than 0, it continues the previous call, and gets the same number.
        """
        known = self.get(model)
        number = 0 if known is None else known + (initial_epoch == 0)
        self.put(model, number)
        return number


def make_reader(
    config: Config,
    strategy: Strategy,
    devices: Devices,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int,
    *,
    shuffle: bool = False,
    steps: int | None = None,
    class_weight: dict[int, float] | None = None,
    training: bool = False,
    fitting: bool = False,
    fit_number: int = 0,
    known_streams: dict[int, Stream] | None = None,
) -> Reader:
    """Makes the reader of this process for the data of a user.

    Args:
        config: configuration of the run. `make_reader` uses only `seed` and `strategy`.
        strategy: strategy of the run. Its `split` says which rows this process reads.
        devices: devices of the run.
        x: data of the user. See `kerasdp.Runner.fit` for `x`, `y`, `sample_weight`, `class_weight` and `shuffle`.
        batch_size: size of the global batch.
        steps: number of batches of an epoch; None: one pass over the data.
        training: whether the data is training data. If an epoch has more batches than the training data, the epoch
            continues with the next pass over the data.
        fitting: whether the data is read in many epochs, so that the devices may cache it.
        fit_number: number of earlier calls of `fit` that trained the model from epoch 0. Each `fit` has a different
            order.
        known_streams: streams of iterators that can be read only once, by the `id` of the iterator. Later calls with
            the same iterator use the same stream.

    Raises:
        UserError: if the data cannot be split over the devices, or if targets or weights are passed twice.
    """
    split = dataclasses.replace(strategy.split, micro_batch_rows=None)
    seed = seed_of_fit(config.seed, fit_number)
    source = _source_of(x, y, sample_weight, class_weight)
    if source is not None:
        steps = _capped(steps, there := -(-source.num_samples // batch_size))
        if steps is not None and not training:  # else samples would count twice
            steps = min(steps, there)
        order = Order(
            num_samples=source.num_samples, batch_size=batch_size, seed=seed, shuffle=shuffle, steps_per_epoch=steps
        )
        is_kept = fitting and _stays_on_device(source, config, devices)
        reader = SampleReader(source, order, split, is_kept)
        if _is_copied_at_once(source, batch_size, devices):
            reader.num_threads = 0
        return reader
    if y is not None or sample_weight is not None:
        raise UserError(f"x ({type(x).__name__}) yields batches with targets and weights; remove y and sample_weight")
    if not hasattr(x, "__iter__") and not isinstance(x, keras.utils.PyDataset):
        raise UserError(f"x: expected arrays, or an object that yields batches. Received: {type(x).__name__}")
    steps = _capped(steps, steps or length_of(x))  # endless data is allowed only with steps
    own = {"class_weight": class_weight, "scatter": strategy.processes.open_scatter(), "warn": report.warn}
    if not isinstance(x, keras.utils.PyDataset):
        return StreamReader(x, split, steps, seed=seed if training else None, known_streams=known_streams, **own)
    if not training and steps is not None and x.num_batches:  # else samples would count twice
        steps = min(steps, x.num_batches)
    return IndexedReader(x, split, steps, order_seed=seed if training and shuffle else None, **own)


def _is_copied_at_once(source: Any, batch_size: int, devices: Devices) -> bool:
    """Returns whether reading a batch in advance in a thread takes more time than it saves.

    Returns False on GPUs and TPUs, where copies run in a separate stream.
    """
    is_small = type(source) is ArraySource and source.num_bytes * batch_size <= _FEW_BYTES * source.num_samples
    return is_small and not devices.is_accelerator


def _source_of(x: Any, y: Any, sample_weight: Any, class_weight: dict[int, float] | None) -> Any:
    """Returns the data as a source that reads samples by index; None if `x` yields batches."""
    if _is_source(x):
        if any(part is not None for part in (y, sample_weight, class_weight)):
            raise UserError(f"x ({type(x).__name__}) holds targets and weights; remove y, sample_weight, class_weight")
        return x
    if not is_of_arrays(x):
        return None
    if class_weight is not None:
        if sample_weight is not None:
            raise UserError("expected class_weight or sample_weight. Received: both; remove one")
        sample_weight = weights_of_classes(y, class_weight)
    return ArraySource(x, y, sample_weight)


def first_of(reader: Reader) -> Batch:
    """Returns the first batch of a reader.

    If the data uses `keras.random`, the random values are the same on every backend, as in a feed.
    """
    with portable_draws(DATA):
        batch = reader.first()
    if keras.backend.backend() != "tensorflow":
        refuse_strings(batch.inputs, "inputs")
        refuse_strings(batch.targets, "targets")
    return batch


@contextlib.contextmanager
def open_feed(strategy: Strategy, reader: Reader, state: RunState | None = None) -> Iterator[Feed]:
    """Yields a feed of the reader's batches, from the position in `state`. Closes the feed after the block."""
    feed = Feed(reader, strategy.shard_batch, state, lambda: portable_draws(DATA))
    yield feed
    feed.close()  # not after a failure, when other processes may be gone


def _capped(steps: int | None, there: int | None) -> int | None:
    """Returns the number of batches of an epoch, at most `keras.config.max_steps_per_epoch()`.

    None means all batches of the data.
    """
    most = keras.config.max_steps_per_epoch()
    return steps if most is None or (steps or there or most) < most else most


def _is_source(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("num_samples", "inputs", "targets")) and not isinstance(
        x, keras.utils.PyDataset
    )


def _stays_on_device(source: Any, config: Config, devices: Devices) -> bool:
    """Returns whether each device caches the inputs of a source, so that steps take rows from the cache."""
    may_stay = devices.is_accelerator and config.strategy == "data"
    return may_stay and isinstance(source, ArraySource) and source.num_bytes <= MOST_ON_DEVICE
