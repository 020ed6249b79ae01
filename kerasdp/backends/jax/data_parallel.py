"""JAX: trains a replica on each device, all in one program, with `keras.distribution.DataParallel`."""

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import jax

from kerasdp.backends.base import DeviceBatch, StepFunctions, Strategy, Tensor, processes_of
from kerasdp.backends.jax.devices import (
    BatchSharder,
    DeviceMesh,
    device_names,
    differing_variables,
    peak_memory_by_device,
    start_jax,
    variables_not_on,
    without_distribution,
)
from kerasdp.backends.jax.devices import put_rows as put
from kerasdp.backends.jax.train_step import make_step_functions
from kerasdp.backends.steps import all_variables
from kerasdp.config import Config
from kerasdp.portability.replica_context import ReplicaContext
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.run_state import RunState

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


class DataParallel(Strategy):
    """A replica of the model on each device. See `kerasdp.backends.base.Strategy`."""

    splits_batches = False

    takes_several_steps = True

    def __init__(self, devices: Devices, config: Config):
        self.num_devices = self.num_replicas = devices.count
        self.processes = processes_of(devices)
        self.shard = self.processes.rank, self.processes.num_processes
        self.devices = start_jax(devices, config)
        self._mesh = DeviceMesh(self.devices)
        self._sharder = BatchSharder(self._mesh.split, self._mesh.copied)

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.DataParallel":
        import keras

        from kerasdp.keras_compat.settings import place_variables_by

        if self.processes.num_processes > 1:
            place_variables_by(put)
        return keras.distribution.DataParallel(devices=device_names(self.devices), auto_shard_dataset=False)

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are made: their variables are copied to all devices."""
        return self._distribution.scope()

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Splits a batch over the devices."""
        return self._sharder.shard_batch(batch)

    def running(self, model: "keras.Model") -> AbstractContextManager[None]:
        """Keeps Keras' own `predict`, as a callback may call it, from sharding its batches."""
        return without_distribution()

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes jitted train, test and predict functions, each one program on all devices."""

        def everywhere(tensor: Tensor) -> Tensor:
            return jax.lax.with_sharding_constraint(tensor, self._mesh.copied)

        several = self.num_replicas > 1
        context = ReplicaContext(num_replicas=self.num_replicas, everywhere=everywhere) if several else None
        return make_step_functions(model, self._mesh.copied, context)

    def variables_outside_scope(self, model: "keras.Model") -> list[str]:
        """Returns the paths of the variables that are not on all devices."""
        return variables_not_on(self.devices, all_variables(model))

    def diverged_variables(self, model: "keras.Model") -> list[str]:
        """Returns the paths of variables, seeds included, with a shard that differs between devices that hold it."""
        return differing_variables(model.variables, self.processes)

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device has used; nothing if they share one process."""
        return peak_memory_by_device(self.devices)
