"""Chooses how the data that a user gives to `fit`, `evaluate` or `predict` is read."""

from typing import Any

import keras

from kerasdp.backends.base import Strategy
from kerasdp.config import Config
from kerasdp.data.feed import BatchReader, SampleReader
from kerasdp.data.sampling import Order, seed_of_fit
from kerasdp.data.sources import ArraySource, weights_of_classes
from kerasdp.errors import UserError
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.model_cache import ModelCache

Reader = SampleReader | BatchReader
# Bytes of inputs that stay on each GPU without being asked to.
MOST_ON_DEVICE = 2**30


class FitNumbers(ModelCache[int]):
    """Which orders of the samples a `fit` of a model has: the n-th that begins at epoch 0 has the n-th, from 0."""

    def next(self, model: keras.Model, initial_epoch: int) -> int:
        """Returns the number of one more `fit`. From a later epoch on it continues the orders of the one before."""
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
) -> Reader:
    """Makes the reader of this process for what a user gives as data.

    Args:
        config: `seed`, `data_on_device` and `engine` are read.
        strategy: says which inputs this process reads.
        devices: of the run.
        x: as in `kerasdp.Runner.fit`; so are `y`, `sample_weight`, `class_weight` and `shuffle`.
        batch_size: the global batch.
        steps: batches in an epoch; None: all there are.
        training: whether an epoch of more batches than there are continues with the next pass over the data.
        fitting: whether the data is read in many epochs, so that it may stay on the devices.
        fit_number: how often the model was trained from an epoch 0 before; each time has an order of its own.

    Raises:
        UserError: if the data cannot be split over the devices, or there are two kinds of targets or weights.
    """
    seed, weights_given = seed_of_fit(config.seed, fit_number), sample_weight is not None or class_weight is not None
    if _is_source(x) or _is_of_arrays(x):
        if _is_source(x) and (y is not None or weights_given):
            raise UserError(f"with a {type(x).__name__} as x, leave out y and weights: they are in x")
        if class_weight is not None:
            if sample_weight is not None:
                raise UserError("give class_weight or sample_weight, not both")
            sample_weight = weights_of_classes(y, class_weight)
        source = x if _is_source(x) else ArraySource(x, y, sample_weight)
        if steps is not None and not training:  # else samples would count twice
            steps = min(steps, -(-source.num_samples // batch_size))
        order = Order(
            num_samples=source.num_samples, batch_size=batch_size, seed=seed, shuffle=shuffle, steps_per_epoch=steps
        )
        is_kept = fitting and _stays_on_device(source, config, devices)
        return SampleReader(source, order, strategy.num_replicas, strategy.shard, is_kept)
    if fitting:
        _stays_on_device(x, config, devices)  # raises if it was asked to
    if y is not None or sample_weight is not None:
        raise UserError(f"with batches as x ({type(x).__name__}), leave out y and weights: they are in x")
    if class_weight is not None:
        raise UserError(f"with batches as x ({type(x).__name__}), leave out class_weight: put sample weights into them")
    _check_batches(x, strategy)
    return BatchReader(x, seed if shuffle else None, strategy.num_replicas, strategy.shard, steps)


def _is_of_arrays(x: Any) -> bool:
    is_array = any(hasattr(x, name) for name in ("__array__", "toarray"))  # sparse ones are refused with their name
    return is_array or isinstance(x, (list, tuple, dict))


def _is_source(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("num_samples", "inputs", "targets")) and not isinstance(
        x, keras.utils.PyDataset
    )


def _check_batches(x: Any, strategy: Strategy) -> None:
    if not hasattr(x, "__iter__") and not isinstance(x, keras.utils.PyDataset):
        raise UserError(f"x: expected arrays, or an object that gives batches. Received: {type(x).__name__}")
    if strategy.shard[1] > 1 and not isinstance(x, keras.utils.PyDataset):
        raise UserError(
            f"expected arrays, a kerasdp.ArraySource, a kerasdp.ImageFolder or a keras.utils.PyDataset. Received: "
            f"{type(x).__name__}, which each torch process would iterate by itself, maybe with other batches"
        )


def _stays_on_device(source: Any, config: Config, devices: Devices) -> bool:
    choice, is_in_memory = config.data_on_device, isinstance(source, ArraySource)
    if choice == "on" and not is_in_memory:
        raise UserError(f"--data_on_device=on: expected data in memory. Received: {type(source).__name__}")
    if choice == "auto" and devices.kind == "gpu" and config.engine == "data":
        return is_in_memory and source.num_bytes <= MOST_ON_DEVICE
    return choice == "on"
