"""JAX: trains a replica on each device, all in one program, with `keras.distribution.DataParallel`."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from kerasdp.backends.jax.devices import JaxStrategy, put_each, put_rows, put_whole, shardings_over
from kerasdp.backends.jax.train_step import Layout, make_step_functions
from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, StepFunctions
from kerasdp.data.sampling import CachedRows, Split
from kerasdp.processes.devices import Devices
from kerasdp.run_state import RunState
from kerasdp.same.replica_context import ReplicaContext

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


class DataParallel(JaxStrategy):
    """A replica of the model on each device. See `kerasdp.contract.Strategy`.

    Attributes:
        replicated: the sharding of a tensor that each device holds the whole of.
        by_rows: the sharding of inputs, targets and sample weights.
    """

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        shard = self.processes.rank, self.processes.num_processes
        self.split = Split(devices.count, shard, is_one_program=True)
        self.replicated, self.by_rows = shardings_over(self.devices)

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.Distribution":
        """Keras' distribution of variables over the devices."""
        import keras

        from kerasdp.keras_compat.settings import place_variables_by

        if self.processes.num_processes > 1:
            place_variables_by(put_whole)
        return keras.distribution.DataParallel(devices=self._device_names(), auto_shard_dataset=False)

    def _device_names(self) -> list[str]:
        return [f"{device.platform}:{device.id}" for device in self.devices]

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are made: their variables are distributed over all devices."""
        return self._distribution.scope()

    @functools.cached_property
    def _take_rows(self) -> Any:
        """Takes rows of what is on all devices: each device its own."""
        return jax.jit(lambda arrays, rows: jax.tree.map(lambda leaf: leaf[rows], arrays), out_shardings=self.by_rows)

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings inputs, targets, sample weights and indices to the devices."""
        kept = batch.inputs.kept if isinstance(batch.inputs, CachedRows) else None
        inputs = batch.inputs if kept is None else batch.inputs.numbers
        found = DeviceBatch(inputs, batch.targets, batch.sample_weight, batch.indices.astype("int32"))
        leaves, structure = jax.tree.flatten(found)
        shardings = [*itertools.repeat(self.by_rows, len(leaves) - 1), self.replicated]  # the last are the indices
        found = jax.tree.unflatten(structure, put_each(leaves, shardings))
        if kept is None:
            return found
        whole = kept.copies(lambda arrays: jax.tree.map(lambda leaf: put_rows(leaf, self.replicated), arrays))
        return found._replace(inputs=self._take_rows(whole, found.inputs))

    @contextlib.contextmanager
    def running(self, model: "keras.Model") -> Iterator[None]:
        """Keeps Keras' own `predict`, as a callback may call it, from sharding its batches."""
        import keras

        distribution = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            with super().running(model):
                yield
        finally:
            keras.distribution.set_distribution(distribution)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes jitted train, test and predict functions, each one program on all devices."""
        context = ReplicaContext(num_replicas=self.split.num_replicas) if self.split.num_replicas > 1 else None
        return make_step_functions(model, self.layout(), context, lambda: self.split)

    def layout(self) -> Layout:
        """Returns where the devices hold the variables of a model."""
        return Layout(self.replicated)
