"""JAX: trains a replica on each device, all in one program, with `keras.distribution.DataParallel`."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from kerasdp.backends.jax.devices import JaxStrategy, put_each, put_rows, put_whole, shardings_over
from kerasdp.backends.jax.train_step import Shards, make_step_functions
from kerasdp.config import Config
from kerasdp.data.sampling import CachedRows
from kerasdp.processes.devices import Devices
from kerasdp.run_state import RunState
from kerasdp.same.replica_context import ReplicaContext
from kerasdp.sharding import cut_axis
from kerasdp.step.contract import DeviceBatch, StepFunctions
from kerasdp.step.replica import all_variables, held_in_words, variables_of_own_step

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


class DataParallel(JaxStrategy):
    """A replica of the model on each device. See `kerasdp.step.contract.Strategy`.

    Attributes:
        replicated: the sharding of a tensor that each device holds the whole of.
        by_rows: the sharding of inputs, targets and sample weights.
    """

    splits_batches = False

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self.num_replicas = devices.count
        self.replicated, self.by_rows = shardings_over(self.devices)

    @functools.cached_property
    def _distribution(self) -> "keras.distribution.Distribution":
        """Keras' distribution of variables over the devices."""
        import keras

        from kerasdp.keras_compat.settings import place_variables_by

        if self.processes.num_processes > 1:
            place_variables_by(put_whole)
        names, is_cut = self._device_names(), self.config.shard == "weights"

        class Parts(keras.distribution.DataParallel):
            """Cuts variables by `cut_axis`, if weights are to be."""

            # The slots of a weight do not come here: Keras (3.15) gives them the layout of their weight.
            def get_variable_layout(self, variable: Any) -> Any:
                axis = cut_axis(variable.shape, len(names)) if is_cut else None
                if axis is None:
                    return super().get_variable_layout(variable)
                axes = ["batch" if each == axis else None for each in range(len(variable.shape))]
                return keras.distribution.TensorLayout(axes, self.device_mesh)

        return Parts(devices=names, auto_shard_dataset=False)

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
        context = ReplicaContext(num_replicas=self.num_replicas) if self.num_replicas > 1 else None
        shards = Shards(self.replicated, self._part_of, self.config.shard)
        return make_step_functions(model, shards, context, lambda: self.split)

    def _part_of(self, shape: Sequence[int]) -> NamedSharding:
        """Returns the sharding of a variable that is cut, if `cut_axis` cuts one of this shape."""
        axis = cut_axis(shape, len(self.devices))
        if axis is None:
            return self.replicated
        return NamedSharding(self.replicated.mesh, PartitionSpec(*[None] * axis, "batch"))

    def gather_variables(self, model: "keras.Model") -> None:
        """Gives each process the whole of what the devices of several hosts hold in parts: it could read no other."""
        from kerasdp.keras_compat.layers import set_raw_values

        variables = variables_of_own_step(model)
        set_raw_values(variables, map(self._readable, variables))

    def read(self, model: "keras.Model", variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """See `Strategy`."""
        return [take(whole) if take else None for whole in map(self._readable, variables)]

    def _readable(self, variable: "keras.Variable") -> jax.Array:
        """Returns a variable's value, whole on each device if parts of it are on other hosts."""
        value = variable.value
        is_here = value.is_fully_addressable or value.is_fully_replicated
        return value if is_here else jax.device_put(value, self.replicated)

    def description(self, model: "keras.Model") -> str:
        """See `Strategy`; also how many bytes of all variables a device holds, if it does not hold all."""
        held = held_in_words(model, self.config.shard, self.num_devices)
        return "\n".join(filter(None, [super().description(model), held]))

    def variables_outside_scope(self, model: "keras.Model") -> list[str]:
        """Returns the paths of the variables that are not on all devices."""
        own = set(self.devices)
        return [variable.path for variable in all_variables(model) if variable.value.sharding.device_set != own]
