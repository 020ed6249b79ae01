"""JAX: tensor parallelism. Each device holds a shard of every layer's output channels, and sees the whole batch.

`keras.distribution.ModelParallel` says where variables are; XLA splits the one program accordingly, and adds the
collectives (GSPMD: Xu et al. 2021, arXiv:2105.04663). So the loss and the metrics are those of one
device, whatever they are.
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

# How Keras' layers name the variables whose last axis counts what a layer gives, or what its kernel makes of that:
# kernel, recurrent_kernel, pointwise_kernel, ...
_CUT = ("kernel", "embeddings", "bias", "gamma", "beta", "moving_mean", "moving_variance")


class TensorParallel(ShardedDataParallel):
    """One model on all devices: one program, as with `DataParallel`, whose variables and batches lie otherwise."""

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self.split = Split(1, is_one_program=True)
        self.by_rows = self.replicated  # each device needs all rows

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.Distribution":
        """Keras' distribution of variables over the devices."""
        import keras

        names = self._device_names()

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

    def layout(self) -> Layout:
        """See `DataParallel`. Variables stay as Keras distributes them."""
        return Layout(self.replicated)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes jitted train, test and predict functions, split by XLA as the variables are.

        Raises:
            UserError: if no weight can be cut, so that each device would do all of the work.
        """
        num_devices, cut = len(self.devices), _cut_weights(model)
        if num_devices > 1 and not cut:
            raise UserError(
                f"--strategy=tensor: expected kernels whose last axes divide by the {num_devices} devices; "
                f"{model.name} has none, so each device would do all of the work: use fewer --gpus, or --strategy=data"
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
