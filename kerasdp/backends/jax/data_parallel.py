"""Trains one replica per JAX device, all in one program, with `keras.distribution.DataParallel`."""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kerasdp.backends.jax import processes
from kerasdp.backends.jax.devices import (
    lstms_not_for_cudnn,
    put_each,
    put_rows,
    put_whole,
    shardings_over,
    start_jax,
)
from kerasdp.backends.jax.train_step import Layout, make_step_functions
from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, SingleProcess, StepFunctions, Strategy, T
from kerasdp.data.sampling import CachedRows, Split
from kerasdp.keras_compat.patches import replaced_in_each
from kerasdp.processes.devices import Devices
from kerasdp.run_state import RunState
from kerasdp.same.replica_context import ReplicaContext
from kerasdp.step.replica import compared_variables

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


class DataParallel(Strategy):
    """Trains one replica of the model on each device. Implements `kerasdp.contract.Strategy`.

    Attributes:
        devices: the devices of the run.
        replicated: the sharding of tensors that each device holds as a full copy.
        by_rows: the sharding of tensors that are split by rows: inputs, targets and sample weights.
    """

    def __init__(self, devices: Devices, config: Config):
        self.config = config
        self.processes = SingleProcess() if devices.cluster is None else processes.JaxProcesses(config)
        self.devices = start_jax(devices, config)
        shard = self.processes.rank, self.processes.num_processes
        self.split = Split(devices.count, shard, is_one_program=True)
        self.replicated, self.by_rows = shardings_over(self.devices)
        # There JAX (0.10.2) takes NumPy's arrays as a program's arguments in a tenth of the time of `device_put`.
        self._takes_arrays = devices.count == 1 and not devices.is_accelerator

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.Distribution":
        """Returns the Keras distribution that places variables on the devices."""
        import keras

        from kerasdp.keras_compat.settings import place_variables_by

        if self.processes.num_processes > 1:
            place_variables_by(put_whole)
        return keras.distribution.DataParallel(devices=self._device_names(), auto_shard_dataset=False)

    def _device_names(self) -> list[str]:
        return [f"{device.platform}:{device.id}" for device in self.devices]

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are created. New variables are placed on all devices."""
        return self._distribution.scope()

    @functools.cached_property
    def _take_rows(self) -> Any:
        """Returns a jitted function that selects rows of arrays.

        Each device holds the full arrays, and selects the rows of its shard of the batch.
        """
        return jax.jit(lambda arrays, rows: jax.tree.map(lambda leaf: leaf[rows], arrays), out_shardings=self.by_rows)

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Copies the inputs, targets, sample weights and indices of a batch to the devices."""
        kept = batch.inputs.kept if isinstance(batch.inputs, CachedRows) else None
        inputs = batch.inputs if kept is None else batch.inputs.numbers
        found = DeviceBatch(inputs, batch.targets, batch.sample_weight, batch.indices.astype("int32"))
        if self._takes_arrays and kept is None:
            return found
        found = put_each(found, DeviceBatch(self.by_rows, self.by_rows, self.by_rows, self.replicated))
        if kept is None:
            return found
        whole = kept.copies(lambda arrays: jax.tree.map(lambda leaf: put_rows(leaf, self.replicated), arrays))
        return found._replace(inputs=self._take_rows(whole, found.inputs))

    @contextlib.contextmanager
    def running(self, model: "keras.Model") -> Iterator[None]:
        """Returns the context in which `fit`, `evaluate` and `predict` run.

        If a callback calls Keras' `predict` in this context, Keras does not shard the batches. LSTM layers do not use
        cuDNN if cuDNN fails for them. See `lstms_not_for_cudnn`.
        """
        import keras

        distribution = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            with replaced_in_each((layer, {"use_cudnn": False}) for layer in lstms_not_for_cudnn(model, self.devices)):
                yield
        finally:
            keras.distribution.set_distribution(distribution)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes jitted train, test and predict functions. Each function is one program that runs on all devices."""
        context = ReplicaContext(num_replicas=self.split.num_replicas) if self.split.num_replicas > 1 else None
        return make_step_functions(model, self.layout(), context, lambda: self.split)

    def layout(self) -> Layout:
        """Returns the layout of the model's variables on the devices."""
        return Layout(self.replicated)

    def each_replica(self, function: Callable[[], T], is_traced: bool = True) -> list[T]:
        """Traces a function once, on behalf of all replicas, whether `is_traced` is True or not.

        An eager call of the function would take a minute on a GPU.
        """
        found: list[T] = []
        jax.eval_shape(lambda: found.append(function()))
        return found

    def diverged_variables(self, model: "keras.Model", state_only: bool = False) -> list[str]:
        """Returns the paths of all variables, including seeds, that differ between devices.

        A variable differs if two devices hold different values of the same shard.
        """

        def values_of(variable: "keras.Variable") -> set[tuple[str, bytes]]:
            shards = variable.value.addressable_shards
            return {(str(shard.index), hashlib.sha256(np.asarray(shard.data).tobytes()).digest()) for shard in shards}

        if len(self.devices) == 1:
            return []
        variables = compared_variables(model, state_only)
        own = [values_of(variable) for variable in variables]
        joined = [set().union(*values) for values in zip(*self.processes.all_gather_object(own), strict=True)]
        return [
            variable.path
            for variable, values in zip(variables, joined)
            if len(values) > len({shard for shard, _ in values})
        ]

    def peak_memory_bytes(self) -> int:
        """Returns the peak memory in bytes: the maximum over the devices of this process.

        If the devices do not report their memory, the result is the peak memory of the process.
        """
        own = [device for device in self.devices if device.process_index == jax.process_index()]
        statistics = [device.memory_stats() or {} for device in own]
        return max(figures.get("peak_bytes_in_use", 0) for figures in statistics) or super().peak_memory_bytes()
