"""Shards the optimizer's variables, or all variables, over the devices in data parallelism on JAX.

XLA gathers each weight where a layer uses it. Each device gets only its shard of each gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from kerasdp.backends.jax.data_parallel import DataParallel
from kerasdp.backends.jax.train_step import Layout
from kerasdp.contract import StepFunctions
from kerasdp.keras_compat.patches import step_with
from kerasdp.run_state import RunState
from kerasdp.sharding import cut_axis
from kerasdp.step.replica import held_in_words, optimizers_of, variables_of_own_step

if TYPE_CHECKING:
    import keras


class PartsLayout(Layout):
    """Describes how the devices hold a model's variables if some variables are sharded. See `Layout`."""

    def __init__(self, replicated: NamedSharding, what: str):
        """Stores the sharding of replicated tensors, and which variables are sharded.

        Args:
            replicated: the sharding of replicated tensors.
            what: value of `Config.shard`: `optimizer` shards only optimizer variables, `weights` shards all variables.
        """
        super().__init__(replicated)
        self._what = what

    def part_of(self, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of a variable of this shape.

        The variable is sharded along the axis that `cut_axis` returns. It is replicated if `cut_axis` returns None.
        """
        axis = cut_axis(shape, self.replicated.mesh.size)
        if axis is None:
            return self.replicated
        return NamedSharding(self.replicated.mesh, PartitionSpec(*[None] * axis, "batch"))

    def of_variables(self, model: "keras.Model", variables: "list[keras.Variable]") -> list[NamedSharding]:
        """Returns the sharding of each variable. See `Layout`."""
        slots = {id(slot) for optimizer in optimizers_of(model) for slot in optimizer.variables}
        whole = super().of_variables(model, variables)
        return [
            self.part_of(variable.shape) if self._what == "weights" or id(variable) in slots else known
            for variable, known in zip(variables, whole)
        ]

    def cut(self, values: list[Any]) -> list[Any]:
        """Shards gradients or new weights, so that each device computes only its shard. See `Layout`."""
        return [
            None if value is None else jax.lax.with_sharding_constraint(value, self.part_of(value.shape))
            for value in values
        ]

    def gathering(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps a function of weights so that it gathers sharded weights. See `Layout`.

        Each weight is gathered where the function uses the weight, and gathered again in the backward pass. Between
        both passes, no gathered weight is kept. All other values are kept. Otherwise `jax.checkpoint` would compute
        them twice.
        """
        if self._what != "weights":
            return function

        @jax.custom_vjp
        def whole(value: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(value, self.replicated)

        whole.defvjp(lambda value: (whole(value), None), lambda _, gradient: tuple(self.cut([gradient])))

        def of_parts(weights: Any) -> Any:
            with step_with(is_within_checkpoint=True):
                return function([whole(weight) for weight in weights])

        return jax.checkpoint(of_parts, policy=_is_kept)


def _is_kept(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Returns whether `jax.checkpoint` keeps a value for the backward pass: all values except gathered weights.

    The function recognizes a gathered weight by the operation that gathers it. It cannot use a name
    (`jax.ad_checkpoint.checkpoint_name`). For a function with a custom gradient, JAX (0.10.2) calls the policy before
    the result of the function gets a name.
    """
    if primitive.name != "custom_vjp_call":
        return True
    return [equation.primitive.name for equation in parameters["call_jaxpr"].eqns] != ["sharding_constraint"]


class ShardedDataParallel(DataParallel):
    """Runs a replica of the model on each device, and shards some of the variables over the devices."""

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.Distribution":
        """Returns the Keras distribution that shards variables over the devices. See `DataParallel`."""
        import keras

        if self.config.shard != "weights":
            return super()._distribution
        layout, names = PartsLayout(self.replicated, "weights"), self._device_names()

        class Parts(keras.distribution.DataParallel):
            """Shards each variable along the axis that `cut_axis` returns."""

            # Optimizer slots do not come here: Keras (3.15) gives them the layout of their weight.
            def get_variable_layout(self, variable: Any) -> Any:
                spec = layout.part_of(variable.shape).spec
                axes = [*spec, *[None] * (len(variable.shape) - len(spec))]
                return keras.distribution.TensorLayout(axes, self.device_mesh)

        return Parts(devices=names, auto_shard_dataset=False)

    def layout(self) -> Layout:
        """Returns the shardings of a model's variables. See `DataParallel`."""
        return PartsLayout(self.replicated, self.config.shard)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Returns the step functions. Their description says how many bytes a device holds. See `Strategy`."""
        held = held_in_words(model, self.config.shard, len(self.devices))
        return dataclasses.replace(super().step_functions(model, run_state), description=held)

    def gather_variables(self, model: "keras.Model") -> None:
        """Gathers variables whose shards are on several hosts, so that each process has their whole values.

        A process cannot read shards on other hosts.
        """
        from kerasdp.keras_compat.layers import set_raw_values

        variables = variables_of_own_step(model)
        set_raw_values(variables, map(self._readable, variables))

    def read(self, model: "keras.Model", variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """Calls `take` on the whole value of each variable, and returns the results. See `Strategy`."""
        return [take(whole) if take else None for whole in map(self._readable, variables)]

    def _readable(self, variable: "keras.Variable") -> jax.Array:
        """Returns the value of a variable. Gathers the value on each device if some shards are on other hosts."""
        value = variable.value
        is_here = value.is_fully_addressable or value.is_fully_replicated
        return value if is_here else jax.device_put(value, self.replicated)
