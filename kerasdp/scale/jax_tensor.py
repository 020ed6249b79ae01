"""JAX: tensor parallelism. Each device holds a shard of every layer's output channels, and sees the whole batch.

`keras.distribution.ModelParallel` says where variables are; XLA splits the one program accordingly, and adds the
collectives (GSPMD: Xu et al. 2021, arXiv:2105.04663). So the loss and the metrics are those of one
device, whatever they are.
"""

import functools
from typing import TYPE_CHECKING, Any

from kerasdp.backends.jax.data_parallel import DataParallel
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.processes.devices import Devices
from kerasdp.run_state import RunState
from kerasdp.step.contract import StepFunctions
from kerasdp.step.replica import all_variables

if TYPE_CHECKING:
    import keras

# How Keras' layers name the variables whose last axis counts what a layer gives, or what its kernel makes of that:
# kernel, recurrent_kernel, pointwise_kernel, ...
_CUT = ("kernel", "embeddings", "bias", "gamma", "beta", "moving_mean", "moving_variance")


class TensorParallel(DataParallel):
    """One model on all devices: one program, as with `DataParallel`, whose variables and batches lie otherwise."""

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self.num_replicas = 1
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
        return super().step_functions(model, run_state)


def _cut_weights(model: "keras.Model") -> "list[keras.Variable]":
    return [weight for weight in model.weights if not weight.value.is_fully_replicated]
