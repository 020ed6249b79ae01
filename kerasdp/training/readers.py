"""Chooses how the data that a user gives to `fit`, `evaluate` or `predict` is read."""

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

# Bytes of inputs that stay on each GPU without being asked to.
MOST_ON_DEVICE = 2**30
# Bytes of a batch's inputs in memory that are copied sooner than a thread can be asked to do it.
_FEW_BYTES = 2**20


class FitNumbers(ModelCache[int]):
    """Numbers the fits of each model, so that each new `fit` shuffles differently."""

    def next(self, model: keras.Model, initial_epoch: int) -> int:
        """Returns the number of one more `fit`, from 0. One that begins at a later epoch continues the last number."""
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
    """Makes the reader of this process for what a user gives as data.

    Args:
        config: `seed` and `strategy` are read.
        strategy: says which inputs this process reads.
        devices: of the run.
        x: as in `kerasdp.Runner.fit`; so are `y`, `sample_weight`, `class_weight` and `shuffle`.
        batch_size: the global batch.
        steps: batches in an epoch; None: all there are.
        training: whether an epoch of more batches than there are continues with the next pass over the data.
        fitting: whether the data is read in many epochs, so that it may stay on the devices.
        fit_number: how often the model was trained from an epoch 0 before; each time has an order of its own.
        known_streams: keeps what can be read only once from one call to the next.

    Raises:
        UserError: if the data cannot be split over the devices, or there are two kinds of targets or weights.
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
        raise UserError(f"with batches as x ({type(x).__name__}), leave out y and weights: they are in x")
    if not hasattr(x, "__iter__") and not isinstance(x, keras.utils.PyDataset):
        raise UserError(f"x: expected arrays, or an object that gives batches. Received: {type(x).__name__}")
    steps = _capped(steps, steps or length_of(x))  # of what has no end, with steps alone
    own = {"class_weight": class_weight, "scatter": strategy.processes.open_scatter(), "warn": report.warn}
    if not isinstance(x, keras.utils.PyDataset):
        return StreamReader(x, split, steps, seed=seed if training else None, known_streams=known_streams, **own)
    if not training and steps is not None and x.num_batches:  # else samples would count twice
        steps = min(steps, x.num_batches)
    return IndexedReader(x, split, steps, order_seed=seed if training and shuffle else None, **own)


def _is_copied_at_once(source: Any, batch_size: int, devices: Devices) -> bool:
    """Returns whether reading a batch ahead, in a thread, costs more than it saves. To a GPU copies have a stream."""
    is_small = type(source) is ArraySource and source.num_bytes * batch_size <= _FEW_BYTES * source.num_samples
    return is_small and not devices.is_accelerator


def _source_of(x: Any, y: Any, sample_weight: Any, class_weight: dict[int, float] | None) -> Any:
    """Returns samples that can be read by their numbers; None for batches."""
    if _is_source(x):
        if any(part is not None for part in (y, sample_weight, class_weight)):
            raise UserError(f"with a {type(x).__name__} as x, leave out y and weights: they are in x")
        return x
    if not is_of_arrays(x):
        return None
    if class_weight is not None:
        if sample_weight is not None:
            raise UserError("give class_weight or sample_weight, not both")
        sample_weight = weights_of_classes(y, class_weight)
    return ArraySource(x, y, sample_weight)


def first_of(reader: Reader) -> Batch:
    """Returns the first batch; data that draws by `keras.random` draws the same on every backend, here as in a feed."""
    with portable_draws(DATA):
        batch = reader.first()
    if keras.backend.backend() != "tensorflow":
        refuse_strings(batch.inputs, "inputs")
        refuse_strings(batch.targets, "targets")
    return batch


@contextlib.contextmanager
def open_feed(strategy: Strategy, reader: Reader, state: RunState | None = None) -> Iterator[Feed]:
    """Yields a feed of the reader's batches, from where `state` says, and closes it at the end."""
    feed = Feed(reader, strategy.shard_batch, state, lambda: portable_draws(DATA))
    yield feed
    feed.close()  # not after a failure, when other processes may be gone


def _capped(steps: int | None, there: int | None) -> int | None:
    """Returns the batches of an epoch as `keras.config.max_steps_per_epoch` allows; None: all that are there."""
    most = keras.config.max_steps_per_epoch()
    return steps if most is None or (steps or there or most) < most else most


def _is_source(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("num_samples", "inputs", "targets")) and not isinstance(
        x, keras.utils.PyDataset
    )


def _stays_on_device(source: Any, config: Config, devices: Devices) -> bool:
    """Returns whether the inputs of a source are kept on each device, where a step then takes its rows."""
    may_stay = devices.is_accelerator and config.strategy == "data"
    return may_stay and isinstance(source, ArraySource) and source.num_bytes <= MOST_ON_DEVICE
