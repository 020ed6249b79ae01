"""Compiles the JAX functions that train, test and predict with a model on all devices."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kerasdp.contract import DeviceBatch, StepFunctions, Tensor, Trained
from kerasdp.data.sampling import ReplicaRows, Split
from kerasdp.keras_compat.patches import step_with
from kerasdp.run_state import Detail
from kerasdp.same.replica_context import ReplicaContext, use
from kerasdp.step.fit_step import fit_step
from kerasdp.step.replica import (
    Found,
    Gradients,
    LossOfPass,
    Pass,
    Received,
    Replica,
    TrainedWeights,
    require_leaves,
    variables_of_own_step,
)

if TYPE_CHECKING:
    import keras

    from kerasdp.step.global_batch import GlobalBatch


class ModelState:
    """Passes the values of variables to a JAX function, and stores the values that the function returns.

    Between two calls of the function, the variables hold the values.

    Args:
        variables: lists of variables.
        shardings: one entry for each list: a single sharding for all its values, or a list with one sharding per value.
    """

    def __init__(self, variables: "Sequence[list[keras.Variable]]", shardings: Sequence[Any]):
        self._variables, self.shardings = [variable for each in variables for variable in each], tuple(shardings)
        self._sizes = [len(each) for each in variables]
        self._last: Any = None
        self._last_values: list[jax.Array] = []

    def read(self) -> Any:
        """Returns the values of the variables as lists.

        If no variable has been set since the last `write`, these are the lists passed to `write`. In Keras 3.15,
        `assign` can leave two variables with the same array, for example weights and their averages at the end of
        training. A step cannot donate an array twice. So among variables that share an array, all except the last get a
        copy.
        """
        from kerasdp.keras_compat.layers import raw_values

        values = raw_values(self._variables)
        if self._last is None or not all(map(operator.is_, values, self._last_values)):
            last = {id(value): place for place, value in enumerate(values)}
            given = (value if last[id(value)] == place else jnp.copy(value) for place, value in enumerate(values))
            lists = tuple(list(itertools.islice(given, size)) for size in self._sizes)
            self.write(jax.device_put(lists, self.shardings))
        return self._last

    def write(self, values: Any) -> None:
        """Sets the variables to the values that a function returned.

        JAX has already deleted the old values that were donated to the function.
        """
        from kerasdp.keras_compat.layers import set_raw_values

        self._last, self._last_values = values, [*itertools.chain(*values)]
        set_raw_values(self._variables, self._last_values)


class Layout:
    """Describes how the devices hold a model's variables. In this class, each device holds a copy of each variable.

    `kerasdp.scale.jax_shards.PartsLayout` shards variables.

    Attributes:
        replicated: the sharding of tensors that each device holds as a full copy.
        is_on_cpu: whether the devices are CPUs. On CPUs, a convolution within a loop takes 10 to 15 times as long as
            outside of loops. In loops, XLA (jaxlib 0.10.2) uses another kernel.
    """

    def __init__(self, replicated: NamedSharding):
        self.replicated = replicated
        self.is_on_cpu = replicated.mesh.devices.flat[0].platform == "cpu"

    def of_variables(self, model: "keras.Model", variables: "list[keras.Variable]") -> list[NamedSharding]:
        """Returns one sharding for each of the given variables of a model.

        The value of a new variable or of a reset metric is on one device, without a `NamedSharding`. For this value,
        the method returns the replicated sharding. Otherwise JAX (0.10.2) would compile another program for this value.
        It would compile the first training step three times.
        """
        found = (variable.value.sharding for variable in variables)
        return [each if isinstance(each, NamedSharding) else self.replicated for each in found]

    def cut(self, values: list[Any]) -> list[Any]:
        """Shards gradients or new weights, so that each device computes only its shard. This class shards nothing."""
        return values

    def gathering(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps a function of weights. The wrapper first gathers all sharded weights. This class shards nothing."""
        return function


def _state_of(model: "keras.Model", step: str, layout: Layout) -> ModelState:
    """Returns the state of a step: the variables that the step takes, with their shardings.

    Args:
        model: the model.
        step: `train`, `test` or `predict`. The model's step may be user-defined.
        layout: how the devices hold the variables.
    """
    from kerasdp.keras_compat.models import portable_steps

    variables = _lists_of_portable(model) if f"{step}_step" in portable_steps(model) else _lists_of(model, step)
    return ModelState(variables, [layout.of_variables(model, each) for each in variables])


def _lists_of(model: "keras.Model", step: str) -> tuple[list["keras.Variable"], ...]:
    """Returns the lists of variables that Keras' step methods take. `step` is `train`, `test` or `predict`."""
    optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
    weights, metrics = (model.trainable_variables, model.non_trainable_variables), model.metrics_variables
    slots = [] if optimizer is None else optimizer.variables
    return {"train": (*weights, slots, metrics), "test": (*weights, metrics), "predict": weights}[step]


def make_step_functions(
    model: "keras.Model",
    layout: Layout,
    context: ReplicaContext | None,
    split_of_training: Callable[[], Split] = lambda: Split(1),
) -> StepFunctions:
    """Makes train, test and predict functions. When layers are frozen or unfrozen, the step is compiled again.

    Each function is one program for the whole global batch. XLA splits this program over the devices, based on the
    shardings of the inputs and variables. Padding makes the number of rows divisible by the number of devices, because
    inputs and outputs must be divisible. The program itself removes the padding, because XLA can split uneven shapes
    within a program. So every layer, loss and metric sees the same batch as on one device.

    Args:
        model: a built and compiled model.
        layout: how the devices hold the variables.
        context: the context of the layers in a training step, or None for a single device.
        split_of_training: a function that returns how a training batch is split.
    """
    from kerasdp.keras_compat.models import own_steps, portable_steps

    own, weights = own_steps(model), TrainedWeights(model)

    def train_step(detail: Detail, state: Any, data: DeviceBatch) -> tuple[Any, Any]:
        from kerasdp.step.gradients import in_scope

        with use(context):
            if "train_step" in portable_steps(model):
                logs, state = _portable_step(model, "train_step", state, data)
                return (logs.get("loss"), None, logs, {}), state
            if "train_step" in own:
                logs, state = model.train_step(state, _packed(data))
                return (logs.get("loss"), None, logs, {}), state
        replica = WholeBatch(model, layout, context, split_of_training())
        with step_with(kept=set(map(id, model.non_trainable_variables))):
            done, state = in_scope(_lists_of(model, "train"), state, lambda: fit_step(replica, data, detail))
        return tuple(done), state

    def on_state(step: Callable[..., Any], name: str) -> Callable[[Any], Any]:
        made: dict[Any, Callable[[Any], Any]] = {}

        def run(data: Any) -> Any:
            key = weights.key(), split_of_training().micro_batch_rows if name == "train" else None
            if key not in made:
                state = _state_of(model, name, layout)
                made[key] = _bind_state(model, layout.replicated, step, state, is_training=name == "train")
            return made[key](data)

        return run

    train = {detail: on_state(functools.partial(train_step, detail), "train") for detail in Detail}
    several = on_state(_several(functools.partial(train_step, Detail.NOTHING)), "train")
    # Several steps run as a loop within one program. A model that runs eagerly has no program.
    takes_several = model.jit_compile and not model.run_eagerly and not layout.is_on_cpu
    return StepFunctions(
        train=lambda batch, detail: Trained(*train[detail](batch)),
        train_several=(lambda batches: Trained(*several(batches))) if takes_several else None,
        test=on_state(functools.partial(_evaluation_step, model, "test_step"), "test"),
        predict=on_state(functools.partial(_evaluation_step, model, "predict_step"), "predict"),
    )


def _evaluation_step(model: "keras.Model", name: str, state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
    """Runs `test_step` or `predict_step` of a model. See `_state_of` for `state`."""
    from kerasdp.keras_compat.models import portable_steps

    if name == "predict_step":
        data = data[0], None, None, data[3]
    if name in portable_steps(model):
        return _portable_step(model, name, state, data)
    outputs, changed = getattr(model, name)(state, _packed(data))
    return outputs, changed if name == "test_step" else (state[0], changed)


def _lists_of_portable(model: "keras.Model") -> tuple[list["keras.Variable"], list["keras.Variable"]]:
    """Returns two lists: the trainable weights, and all other variables that a user-defined step may change."""
    weights = model.trainable_variables
    seen = {id(weight) for weight in weights}
    return weights, [variable for variable in variables_of_own_step(model) if id(variable) not in seen]


def _portable_step(model: Any, name: str, state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
    """Runs a user-defined step that takes only the data. On JAX, Keras' steps also take the values of the variables.

    `state` contains the values of the variables in `_lists_of_portable`.
    """
    from kerasdp.step.gradients import in_scope

    return in_scope(_lists_of_portable(model), state, lambda: getattr(model, name)(_packed(data)))


def _bind_state(
    model: "keras.Model",
    replicated: NamedSharding,
    step: Callable[..., Any],
    state: ModelState,
    *,
    is_training: bool,
) -> Callable[[Any], Any]:
    """Returns a function `run(data)`, which returns the outputs of a step and updates the model's variables.

    The step is compiled with `jax.jit` if `model.jit_compile` is True and `model.run_eagerly` is False. Otherwise the
    step runs eagerly. A training step donates the old values of the variables. An evaluation step does not change the
    weights, which are the first list of values. So an evaluation step does not return this list.
    """
    from kerasdp.keras_compat.layers import forget_added_losses

    # With several processes outputs are replicated, so that each can read them; with one JAX chooses.
    output_sharding = None if replicated.is_fully_addressable else replicated
    num_unchanged = 0 if is_training else 1  # lists that come first

    def traced_step(values: Any, data: Any) -> tuple[Any, Any]:
        forget_added_losses(model)
        outputs, new = step(values, data)
        return outputs, new[num_unchanged:]

    # The name of the program in profiles.
    traced_step.__name__ = traced_step.__qualname__ = getattr(step, "func", step).__name__
    # Eagerly a layer or a user-defined step gets arrays of JAX.
    run_step: Any = lambda values, data: traced_step(values, jax.tree.map(jnp.asarray, data))  # noqa: E731
    if not model.run_eagerly and model.jit_compile:
        shardings = output_sharding, state.shardings[num_unchanged:]
        run_step = jax.jit(traced_step, donate_argnums=(0,) if is_training else (), out_shardings=shardings)

    def run(data: Any) -> Any:
        values = state.read()
        outputs, new = run_step(values, data)
        state.write((*values[:num_unchanged], *new))
        return outputs

    return run


def _several(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that trains on several batches of the same shape.

    The function returns the losses and learning rates of all steps, and the logs of the last step.
    """

    def step(state: Any, batch: DeviceBatch) -> tuple[Any, Any]:
        (loss, rate, logs, _), state = train_step(state, batch)
        return state, (loss, rate, logs)

    def train_steps(state: Any, batches: list[DeviceBatch]) -> tuple[Any, Any]:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        state, (losses, rates, logs) = jax.lax.scan(step, state, stacked)
        return (losses, rates, jax.tree.map(lambda leaf: leaf[-1], logs), {}), state

    return train_steps


def _cut(data: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Removes the padding rows from the inputs, targets and sample weights of a batch."""
    inputs, targets, sample_weight, indices = data
    return jax.tree.map(lambda leaf: leaf[: len(indices)], (inputs, targets, sample_weight))


def _packed(data: tuple[Any, ...]) -> Any:
    """Removes the padding rows of a batch. Packs the batch in the form that Keras passes to a step."""
    from kerasdp.keras_compat.models import as_keras_gives

    return as_keras_gives(_cut(data))


class WholeBatch(Replica):
    """Runs a training step on the whole global batch, as a single replica that stands for all devices.

    XLA splits the batch over the devices, and sums values over the devices where the step requires this.

    Args:
        model: a built and compiled model.
        layout: how the devices hold the variables.
        context: the context of the layers, or None for a single device.
        split: how the batch is split.
    """

    def __init__(self, model: "keras.Model", layout: Layout, context: ReplicaContext | None, split: Split):
        from kerasdp.keras_compat.layers import seed_variables

        super().__init__(model)
        self._layout, self._context, self._split = layout, context, split
        self._seeds = set(map(id, seed_variables(model)))

    def training_split(self) -> Split:
        """Returns how a training batch is split."""
        return self._split

    def passes(self, batch: DeviceBatch) -> list[Pass]:
        """Returns the passes of a training step: one pass for each micro-batch, or a single pass for the whole batch.

        A single pass gets the batch without padding.
        """
        passes = super().passes(batch)
        if len(passes) > 1:
            return passes
        return [passes[0]._replace(batch=DeviceBatch(*_cut(batch), batch.indices))]

    def rows_of(self, leaf: jax.Array, rows: slice, num_rows: int) -> jax.Array:
        """Returns the rows of a micro-batch.

        The method takes the same number of rows from each device, so no data moves between devices.
        """
        of_devices = leaf.reshape(self._split.num_replicas, -1, *leaf.shape[1:])
        return of_devices[:, rows].reshape(-1, *leaf.shape[1:])[:num_rows]

    def context_of_pass(self, one: Pass) -> ReplicaContext | None:
        """Returns the context of the layers in a pass. See `Replica.context_of_pass`."""
        from kerasdp.step.row_search import row_layout_of

        if one.total_rows is None:
            return self._context
        num_rows, axes = len(one.batch.indices), row_layout_of(self.model)
        return dataclasses.replace(
            self._context or ReplicaContext(num_replicas=1), num_rows=num_rows, rows=num_rows,
            first_row=one.replicas[0].first, total_rows=one.total_rows, row_layout=axes, is_micro_batch=True,
            calling=[], regularized={}, _calls={},
        )  # fmt: skip

    def loss_of_pass(self, one: Pass, outputs: Any, context: ReplicaContext | None) -> "GlobalBatch":
        """Computes the loss of a pass, as if a single device had all rows. See `Replica.loss_of_pass`."""
        if context is not None:
            context = None if one.total_rows is None else dataclasses.replace(context, num_replicas=1)
        return super().loss_of_pass(one, outputs, context)

    def differentiate(self, compute: LossOfPass, one: Pass) -> tuple[list[Tensor | None], "GlobalBatch", Found]:
        """Computes the gradients of a pass. See `Replica.differentiate`."""
        from kerasdp.keras_compat.layers import InnerScope, current_value

        weights, made = self.model.trainable_weights, list[Any]()

        def loss_of(values: list[jax.Array]) -> tuple[jax.Array, Any]:
            with InnerScope(zip(weights, values)) as scope:
                loss, global_batch, found = compute(one)
            require_leaves(weights, scope.assigned)
            made[:] = scope, global_batch
            # Assigned values must be returned: a function that JAX differentiates has no other way out for them.
            return loss, (global_batch.tensors(), found, scope.assigned_values())

        values = list(map(current_value, weights))
        gradients, (tensors, found, assigned) = jax.grad(self._layout.gathering(loss_of), has_aux=True)(values)
        scope, global_batch = made
        scope.write_back(assigned)
        return gradients, global_batch.with_tensors(tensors), found

    def add_up_passes(
        self, compute: LossOfPass, passes: list[Pass]
    ) -> tuple[list[Tensor | None], "GlobalBatch", Found]:
        """Adds up the gradients of all passes of a step. Passes of the same size run in one loop."""
        from kerasdp.keras_compat.layers import InnerScope, current_value
        from kerasdp.step.global_batch import Sums, added

        if len(passes) == 1:
            return self.differentiate(compute, passes[0])
        weights, variables = self.model.trainable_weights, self.model.non_trainable_variables
        begun = list(map(current_value, variables))
        global_batches: list[GlobalBatch] = []

        def run(carry: Any, one: Pass) -> tuple[Any, Sums]:
            # Random layers begin each pass with the seeds of the step; all else goes from one to the next.
            total, values = carry
            values = [old if id(each) in self._seeds else new for each, old, new in zip(variables, begun, values)]
            with InnerScope(zip(variables, values)) as scope:
                own, global_batch, _ = self.differentiate(compute, self.wait_for(total, one))
            global_batches.append(global_batch)
            total = self._layout.cut(jax.tree.map(jnp.add, total, own))
            return (total, list(map(scope.get_current_value, variables))), global_batch.sums

        first, size = passes[0], len(passes[0].batch.indices)
        full = [one for one in passes if len(one.batch.indices) == size]

        def step(carry: Any, numbered: Any) -> tuple[Any, Sums]:
            number, data = numbered
            batch = DeviceBatch(data[0], data[1], data[2], first.batch.indices)
            rows = ReplicaRows(number * size, size, size)
            return run(carry, first._replace(batch=batch, replicas=(rows,)))

        stacked = jax.tree.map(lambda *each: jnp.stack(each), *[one.batch[:3] for one in full])
        carry: Any = self._layout.cut([jnp.zeros_like(current_value(weight)) for weight in weights]), begun
        numbered = jnp.arange(len(full), dtype="int32"), stacked
        carry, each = jax.lax.scan(step, carry, numbered, unroll=self._layout.is_on_cpu)
        sums = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), each)
        for one in passes[len(full) :]:
            carry, left = run(carry, one)
            sums = added(sums, left)
        gradients, values = carry
        for variable, value in zip(variables, values):
            variable.assign(value)
        global_batches[-1].sums = sums
        return gradients, global_batches[-1], {}

    def wait_for(self, gradients: Gradients, one: Pass) -> Pass:
        """Makes a pass start only after the given gradients are computed.

        Otherwise XLA on the CPU (jaxlib 0.10.2) would run all forward passes first, and keep all of their activations.
        `jax.lax.optimization_barrier` does not help, because XLA drops the barrier before it orders operations. So the
        method adds zeros that depend on the gradients to the inputs.
        """
        if not self._layout.is_on_cpu:
            return one
        first = (jnp.ravel(gradient)[0] for gradient in gradients if gradient is not None)
        zero = sum((0 * jnp.nan_to_num(number) for number in first), jnp.zeros(()))
        inputs = jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), one.batch.inputs)
        return one._replace(batch=one.batch._replace(inputs=inputs))

    def all_reduce(self, gradients: Gradients, to_reduce: dict[str, Tensor]) -> Callable[[], Received]:
        """Returns a function that returns the gradients and `to_reduce`, without an all-reduce.

        XLA has already computed both for the whole global batch. If variables are sharded, each device gets only its
        shard of the gradients.
        """
        return lambda: (self._layout.cut(gradients), to_reduce)

    def update(self, update: Callable[[], None]) -> None:
        """Runs the optimizer's update. If variables are sharded, each device updates only its shards."""
        from kerasdp.keras_compat.layers import current_value
        from kerasdp.keras_compat.optimizers import applying_in_scope

        with applying_in_scope():
            update()
        weights = self.model.trainable_weights
        for weight, value in zip(weights, self._layout.cut(list(map(current_value, weights)))):
            weight.assign(value)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Returns the tensor unchanged, because it is already a sum over the whole batch."""
        return tensor
