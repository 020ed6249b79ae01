"""Implements tensor parallelism on JAX: each layer's output channels are sharded over the devices.

Each device gets the whole batch. `keras.distribution.ModelParallel` sets the shardings of the variables. XLA splits the
program according to these shardings, and adds the collectives (GSPMD: Xu et al. 2021, arXiv:2105.04663). So each loss
and each metric has the same value as on one device.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from kerasdp.backends.jax.train_step import Layout
from kerasdp.config import Config
from kerasdp.contract import StepFunctions
from kerasdp.data.sampling import Split
from kerasdp.errors import UserError
from kerasdp.processes.devices import Devices
from kerasdp.run_state import RunState
from kerasdp.scale.jax_shards import ShardedDataParallel
from kerasdp.step.replica import all_variables

if TYPE_CHECKING:
    import keras

# Endings of the names of Keras' variables whose last axis counts the outputs of a layer or of its kernel: kernel,
# recurrent_kernel, pointwise_kernel, ...
_CUT = ("kernel", "embeddings", "bias", "gamma", "beta", "moving_mean", "moving_variance")


class TensorParallel(ShardedDataParallel):
    """Runs one model as one program on all devices, with sharded variables and the whole batch on each device."""

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self.split = Split(1, is_one_program=True)
        self.by_rows = self.replicated  # each device needs all rows

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.Distribution":
        """Returns Keras' distribution of variables over the devices."""
        import keras

        names = self._device_names()

        class LastAxes(keras.distribution.ModelParallel):
            """Shards the last axis of kernels and vectors over the devices.

            An axis is sharded only if its size is divisible by the number of devices.
            """

            # A LayoutMap cannot express this (Keras 3.15): it finds a variable by its path, not by its shape.
            # Optimizer slots do not come here: Keras gives them the layout of their weight.
            def get_variable_layout(self, variable: Any) -> Any:
                shape = variable.shape
                if not variable.name.endswith(_CUT) or not shape or shape[-1] % len(names):
                    return super().get_variable_layout(variable)
                axes = [None] * (len(shape) - 1) + ["model"]
                return keras.distribution.TensorLayout(axes, self.device_mesh)

        mesh = keras.distribution.DeviceMesh((1, len(names)), ("batch", "model"), names)
        return LastAxes(layout_map=keras.distribution.LayoutMap(mesh), batch_dim_name="batch", auto_shard_dataset=False)

    def layout(self) -> Layout:
        """Returns the shardings that Keras sets for the variables. See `DataParallel`."""
        return Layout(self.replicated)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Returns jitted train, test and predict functions.

        XLA splits the functions according to the shardings of the variables.

        Raises:
            UserError: if no weight can be sharded, so that each device would do all of the work.
        """
        num_devices, cut = len(self.devices), _cut_weights(model)
        if num_devices > 1 and not cut:
            raise UserError(
                f"--strategy=tensor: expected a kernel with a last axis divisible by {num_devices}, the device count. "
                f"Received: none in {model.name}, so all devices would do the same work; use --strategy=data"
            )
        values = [variable.value for variable in all_variables(model)]
        held = sum(value.addressable_shards[0].data.nbytes for value in values)
        description = (
            f"{len(cut)} of {len(model.weights)} weights are cut in {num_devices}: a device holds {held:,} of "
            f"{sum(value.nbytes for value in values):,} bytes of weights, optimizer and metrics"
        )
        return dataclasses.replace(super().step_functions(model, run_state), description=description)


def _cut_weights(model: "keras.Model") -> "list[keras.Variable]":
    return [weight for weight in model.weights if not weight.value.is_fully_replicated]
