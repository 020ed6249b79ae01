"""JAX: tensor parallelism. Each device holds a shard of every layer's output channels, and sees the whole batch.

`keras.distribution.ModelParallel` says where variables are; XLA splits the one program accordingly, and adds the
collectives (GSPMD: Xu et al. 2021, arXiv:2105.04663). So the loss and the metrics are those of one
device, whatever they are.
"""

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kerasdp.backends.base import DeviceBatch, SingleProcess, StepFunctions, Strategy
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
from kerasdp.backends.jax.train_step import make_step_functions
from kerasdp.backends.steps import all_variables
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.run_state import RunState

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch

# How Keras' layers name the variables whose last axis counts what a layer gives, or what its kernel makes of that:
# kernel, recurrent_kernel, pointwise_kernel, ...
_CUT = ("kernel", "embeddings", "bias", "gamma", "beta", "moving_mean", "moving_variance")


class TensorParallel(Strategy):
    """One model on all devices. See `kerasdp.backends.base.Strategy`."""

    shard = (0, 1)
    splits_batches = False

    takes_several_steps = True

    def __init__(self, devices: Devices, config: Config):
        self.processes = SingleProcess()
        self.num_devices, self.num_replicas = devices.count, 1
        self.devices = start_jax(devices, config)
        self._copied = DeviceMesh(self.devices).copied
        self._sharder = BatchSharder(self._copied, self._copied)

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.ModelParallel":
        """Keras' distribution of variables over the devices."""
        import keras

        names = device_names(self.devices)

        class LastAxes(keras.distribution.ModelParallel):
            """Cuts the last axis of kernels, and of the vectors along it, where it divides by the devices."""

            # A LayoutMap alone cannot say that (Keras 3.15): it knows a variable by its path, not by its shape.
            # The slots of a weight do not come here: Keras gives them the layout of their weight.
            def get_variable_layout(self, variable: Any) -> Any:
                shape = variable.shape
                if not variable.name.endswith(_CUT) or not shape or shape[-1] % len(names):
                    return super().get_variable_layout(variable)
                axes = [None] * (len(shape) - 1) + ["model"]
                return keras.distribution.TensorLayout(axes, self.device_mesh)

        mesh = keras.distribution.DeviceMesh((1, len(names)), ("batch", "model"), names)
        return LastAxes(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch", auto_shard_dataset=False)

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are made: their variables are sharded over the devices."""
        return self._distribution.scope()

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Copies the batch to all devices: each needs all of its rows."""
        return self._sharder.shard_batch(batch)

    def running(self, model: "keras.Model") -> AbstractContextManager[None]:
        """Keeps Keras' own `predict`, as a callback may call it, from sharding its batches."""
        return without_distribution()

    def description(self, model: "keras.Model") -> str:
        """Says how many weights are sharded, and how many bytes of all variables a device holds."""
        values = [variable.value for variable in all_variables(model)]
        held = sum(value.addressable_shards[0].data.nbytes for value in values)
        return (
            f"{len(_cut_weights(model))} of {len(model.weights)} weights are cut in {self.num_devices}: a device holds "
            f"{held:,} of {sum(value.nbytes for value in values):,} bytes of weights, optimizer and metrics"
        )

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes jitted train, test and predict functions, split by XLA as the variables are.

        Raises:
            UserError: if no weight can be cut, so that each device would do all of the work.
        """
        if self.num_devices > 1 and not _cut_weights(model):
            raise UserError(
                f"--strategy=tensor: expected kernels whose last axes divide by the {self.num_devices} devices; "
                f"{model.name} has none, so each device would do all of the work: use fewer --gpus, or --strategy=data"
            )
        return make_step_functions(model, self._copied, None)

    def variables_outside_scope(self, model: "keras.Model") -> list[str]:
        """Returns the paths of the variables that are not on all devices."""
        return variables_not_on(self.devices, all_variables(model))

    def diverged_variables(self, model: "keras.Model") -> list[str]:
        """Returns the paths of variables, seeds included, with a shard that differs between devices that hold it."""
        return differing_variables(model.variables, self.processes)

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device has used; nothing if they share one process."""
        return peak_memory_by_device(self.devices)


def _cut_weights(model: "keras.Model") -> "list[keras.Variable]":
    return [weight for weight in model.weights if not weight.value.is_fully_replicated]
