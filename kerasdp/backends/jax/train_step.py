"""JAX: compiles the functions that train, test and predict with a model on all devices."""

import dataclasses
import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kerasdp.backends.base import DeviceBatch, StepFunctions, Trained
from kerasdp.backends.steps import TrainedWeights, learning_rate, optimizers_of, variables_of_own_step
from kerasdp.data.sampling import Split
from kerasdp.keras_compat.patches import step_with
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.run_state import Detail

if TYPE_CHECKING:
    import keras


class ModelState:
    """The values of lists of variables, as a function of JAX takes and gives them; the variables always hold theirs.

    Args:
        variables: the lists.
        shardings: of each list: one of all its values, or one of each.
    """

    def __init__(self, variables: "Sequence[list[keras.Variable]]", shardings: Sequence[Any]):
        self._variables, self.shardings = [variable for each in variables for variable in each], tuple(shardings)
        self._sizes = [len(each) for each in variables]
        self._last: Any = None
        self._last_values: list[jax.Array] = []

    def take(self) -> Any:
        """Returns the values: the same lists that were given last, unless somebody has set a variable since.

        Keras (3.15) lets two variables hold one array after `assign`, as weights and their averages at the end of a
        training. A step that takes the memory of both needs two.
        """
        from kerasdp.keras_compat.layers import raw_values

        values = raw_values(self._variables)
        if self._last is None or not all(map(operator.is_, values, self._last_values)):
            seen: set[int] = set()

            def own(value: jax.Array) -> jax.Array:
                is_taken = id(value) in seen
                seen.add(id(value))
                return jnp.copy(value) if is_taken else value

            given = map(own, values)
            lists = tuple(list(itertools.islice(given, size)) for size in self._sizes)
            self.give(jax.device_put(lists, self.shardings))  # none is kept as it was before
        return self._last

    def give(self, values: Any) -> None:
        """Sets the variables to the values that a function has given. Those that it took are not there any more."""
        from kerasdp.keras_compat.layers import set_raw_values

        self._keep(values)
        set_raw_values(self._variables, self._last_values)

    def _keep(self, values: Any) -> None:
        self._last, self._last_values = values, [*itertools.chain(*values)]


class Shards(NamedTuple):
    """What of a model's variables the devices hold in parts.

    Attributes:
        replicated: the sharding of what each device holds the whole of.
        part_of: returns the sharding of a variable that is cut, by its shape.
        what: `Config.shard`.
    """

    replicated: NamedSharding
    part_of: Callable[[Sequence[int]], NamedSharding]
    what: str

    def cut(self, values: list[Any]) -> list[Any]:
        """Returns gradients or new weights, of which each device then computes its part alone."""
        if self.what == "none":
            return values
        return [
            None if value is None else jax.lax.with_sharding_constraint(value, self.part_of(value.shape))
            for value in values
        ]

    def gathering(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a function of weights that gathers each where it is used, and once more in the backward pass.

        So none is kept in between. All else is: `jax.checkpoint` would compute it twice.
        """
        if self.what != "weights":
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
    """Returns whether a value that `jax.checkpoint` asks for is kept for the backward pass: all but whole weights.

    JAX (0.10.2) asks for the result of a function with a gradient of its own, before whatever name that gets
    (`jax.ad_checkpoint.checkpoint_name`). So this one is known by what it does.
    """
    if primitive.name != "custom_vjp_call":
        return True
    return [equation.primitive.name for equation in parameters["call_jaxpr"].eqns] != ["sharding_constraint"]


def _state_of(model: "keras.Model", step: str, shards: Shards) -> ModelState:
    """Returns the state of a step, with the lists of Keras' own steps, or those of `_portable_step`.

    `step`: `train`, `test` or `predict`.

    For a value that is on one device without having been sent there, as that of a new variable or a reset metric, JAX
    (0.10.2) compiles another program: it would compile the first training step three times. So these are replicated.
    """
    from kerasdp.keras_compat.models import portable_steps

    optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
    weights, metrics = (model.trainable_variables, model.non_trainable_variables), model.metrics_variables
    slots = [] if optimizer is None else optimizer.variables
    variables = {"train": (*weights, slots, metrics), "test": (*weights, metrics), "predict": weights}[step]
    if f"{step}_step" in portable_steps(model):
        variables = _lists_of_portable(model)

    all_slots = [slot for each in optimizers_of(model) for slot in each.variables] if shards.what == "optimizer" else []
    are_cut = set(map(id, all_slots))

    def sharding_of(variable: "keras.Variable") -> NamedSharding:
        if shards.what == "weights" or id(variable) in are_cut:
            return shards.part_of(variable.shape)
        found = variable.value.sharding
        return found if isinstance(found, NamedSharding) else shards.replicated

    return ModelState(variables, [list(map(sharding_of, each)) for each in variables])


def make_step_functions(
    model: "keras.Model",
    shards: Shards,
    context: ReplicaContext | None,
    split_of_training: Callable[[], Split] = lambda: Split(1),
) -> StepFunctions:
    """Makes jitted train, test and predict functions, again for each set of weights that is trained.

    Each is one program for the whole global batch, which XLA splits over the devices as inputs and variables are. The
    padding that makes the rows divide by the devices is removed INSIDE the program: within it XLA splits uneven shapes
    itself (only inputs and outputs must divide), so every layer, loss and metric sees the batch of one device.

    Args:
        model: built and compiled.
        shards: what the devices hold in parts.
        context: that of the layers in a training step.
        split_of_training: returns how a batch is split that is trained on.
    """
    from kerasdp.keras_compat.models import own_steps, portable_steps

    own, weights = own_steps(model), TrainedWeights(model)

    def train_step(detail: Detail, state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
        with use(context):
            if "train_step" in portable_steps(model):
                logs, state = _portable_step(model, "train_step", state, data)
                return (logs.get("loss"), None, logs, {}), state
            if "train_step" in own:
                logs, state = model.train_step(state, _packed(data))
                return (logs.get("loss"), None, logs, {}), state
            if len(split_of_training().micro_batches(len(data[3]))) > 1:
                compute = functools.partial(_in_micro_batches, data=data, split=split_of_training(), context=context)
                detail = Detail.NOTHING
            else:
                compute = functools.partial(_in_one_pass, data=_cut(data), detail=detail)
            return _train_step(model, state, compute, detail, shards)

    def on_state(step: Callable[..., Any], name: str) -> Callable[[Any], Any]:
        made: dict[Any, Callable[[Any], Any]] = {}

        def run(data: Any) -> Any:
            key = weights.key(), split_of_training().micro_batch_rows if name == "train" else None
            if key not in made:
                state = _state_of(model, name, shards)
                made[key] = _on_state(model, shards.replicated, step, state, is_training=name == "train")
            return made[key](data)

        return run

    train = {detail: on_state(functools.partial(train_step, detail), "train") for detail in Detail}
    several = on_state(_several(functools.partial(train_step, Detail.NOTHING)), "train")
    # As a loop within the program, which Keras does not have where a model runs eagerly.
    takes_several = model.jit_compile and not model.run_eagerly
    return StepFunctions(
        train=lambda batch, detail: Trained(*train[detail](batch)),
        train_several=(lambda batches: Trained(*several(batches))) if takes_several else None,
        test=on_state(functools.partial(_test_step, model), "test"),
        predict=on_state(functools.partial(_predict_step, model), "predict"),
    )


def _test_step(model: "keras.Model", state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
    from kerasdp.keras_compat.models import portable_steps

    if "test_step" in portable_steps(model):
        return _portable_step(model, "test_step", state, data)
    return model.test_step(state, _packed(data))


def _predict_step(model: "keras.Model", state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
    from kerasdp.keras_compat.models import portable_steps

    data = data[0], None, None, data[3]
    if "predict_step" in portable_steps(model):
        return _portable_step(model, "predict_step", state, data)
    outputs, non_trainable_variables = model.predict_step(state, _packed(data))
    return outputs, (state[0], non_trainable_variables)


def _lists_of_portable(model: "keras.Model") -> tuple[list["keras.Variable"], list["keras.Variable"]]:
    """Returns the weights that are trained, and all other variables that a step may change."""
    weights = model.trainable_variables
    seen = {id(weight) for weight in weights}
    return weights, [variable for variable in variables_of_own_step(model) if id(variable) not in seen]


def _portable_step(model: Any, name: str, state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
    """Runs a user-defined step that takes the data alone, as on other backends; `state`: see `_lists_of_portable`."""
    from kerasdp.portability.gradients import in_scope

    return in_scope(_lists_of_portable(model), state, lambda: getattr(model, name)(_packed(data)))


def _on_state(
    model: "keras.Model",
    replicated: NamedSharding,
    step: Callable[..., Any],
    state: ModelState,
    *,
    is_training: bool,
) -> Callable[[Any], Any]:
    """Makes of a step a function of the data alone, which gives its outputs and changes the model's variables.

    It is compiled by JAX's own compiler or left eager, as Keras decides for its own functions. Training alone takes the
    memory of the old values for the new ones; the first list, of the weights, leaves an evaluation as it came.
    """
    # The results that no process has the whole of, none can read; None: whatever JAX chooses.
    results = None if replicated.is_fully_addressable else replicated
    kept = 0 if is_training else 1  # lists that no step changes

    def changing(values: Any, data: Any) -> tuple[Any, Any]:
        outputs, new = step(values, data)
        return outputs, new[kept:]

    changing.__name__ = changing.__qualname__ = getattr(step, "func", step).__name__  # of the program, in profiles
    run_step = changing
    if not model.run_eagerly and model.jit_compile:
        donated = 0 if is_training else ()
        run_step = jax.jit(changing, donate_argnums=donated, out_shardings=(results, state.shardings[kept:]))

    def run(data: Any) -> Any:
        values = state.take()
        outputs, new = run_step(values, data)
        state.give((*values[:kept], *new))
        return outputs

    return run


def _several(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Trains on several batches of one shape; returns their losses and rates, and the last one's logs."""

    def step(state: Any, batch: DeviceBatch) -> tuple[Any, Any]:
        (loss, rate, logs, _), state = train_step(state, batch)
        return state, (loss, rate, logs)

    def train_steps(state: Any, batches: list[DeviceBatch]) -> tuple[Any, Any]:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        state, (losses, rates, logs) = jax.lax.scan(step, state, stacked)
        return (losses, rates, jax.tree.map(lambda leaf: leaf[-1], logs), {}), state

    return train_steps


def _cut(data: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Inputs, targets and sample weights without their padding."""
    inputs, targets, sample_weight, indices = data
    return jax.tree.map(lambda leaf: leaf[: len(indices)], (inputs, targets, sample_weight))


def _packed(data: tuple[Any, ...]) -> Any:
    """Returns the same as Keras hands it to a step."""
    from kerasdp.keras_compat.models import as_keras_gives

    return as_keras_gives(_cut(data))


class Computed(NamedTuple):
    """What the passes of a training step compute of the global batch, before its update.

    Attributes:
        loss: scalar.
        gradients: of the trainable weights.
        rows: inputs, targets, the model's outputs and sample weights, without padding.
        non_trainable: new values of the variables that are not trained.
        metrics: likewise, of the metrics.
        found: what `forward_pass` recorded.
    """

    loss: jax.Array
    gradients: list[Any]
    rows: tuple[Any, Any, Any, Any]
    non_trainable: list[Any]
    metrics: list[Any]
    found: dict[str, Any]


def _train_step(
    model: Any, state: Any, compute: Callable[..., Computed], detail: Detail, shards: Shards
) -> tuple[Any, Any]:
    """Trains on the global batch; returns its loss, learning rate, Keras' logs and what was observed, and the state.

    It is Keras' own step, in one program for all devices: XLA adds the sums over them. Keras' logs hold the mean of the
    epoch, so the loss of the batch is returned besides.
    """
    import keras

    from kerasdp.backends.observer import observed
    from kerasdp.keras_compat.models import update_loss_metric

    trainable, _, optimizer, _ = state
    # Forward and backward pass.
    done = compute(model, state, shards)
    seen = observed(detail, done.gradients, done.found)
    # The update.
    with keras.StatelessScope(list(zip(model.optimizer.variables, optimizer))):
        rate = learning_rate(model.optimizer)
    trainable, optimizer = _updated(model, state, shards.cut(done.gradients))
    trainable = shards.cut(trainable)
    # The metrics.
    with keras.StatelessScope(list(zip(model.metrics_variables, done.metrics))) as scope:
        update_loss_metric(model, done.loss, jax.tree.leaves(done.rows[0])[0].shape[0])
        logs = model.compute_metrics(*done.rows)
    metrics = [scope.get_current_value(variable) for variable in model.metrics_variables]
    return (done.loss, rate, logs, seen), (trainable, done.non_trainable, optimizer, metrics)


def _in_one_pass(model: Any, state: Any, shards: Shards, data: tuple[Any, Any, Any], detail: Detail) -> Computed:
    """Computes the global batch at once; `data`: inputs, targets and sample weights, without padding."""
    import keras

    from kerasdp.backends.observer import forward_pass
    from kerasdp.keras_compat.layers import mask_of, set_mask

    trainable, non_trainable, optimizer, metrics = state
    inputs, targets, sample_weight = data

    def loss_and_updates(trainable: Any) -> tuple[Any, Any]:
        # What layers gave must leave through here: JAX lets nothing else out of a function that it differentiates.
        with forward_pass(detail, model, inputs) as found, _keeping_variables_of(model):
            loss, updates = model.compute_loss_and_updates(
                trainable, non_trainable, metrics, *data, training=True, optimizer_variables=optimizer
            )
        # Only tensors leave, without the masks that layers have left at them.
        return loss, (updates, keras.tree.map_structure(mask_of, updates[1]), found)

    compute = shards.gathering(loss_and_updates)
    (_, (updates, masks, found)), gradients = jax.value_and_grad(compute, has_aux=True)(trainable)
    loss, outputs, non_trainable, metrics = updates
    outputs = keras.tree.map_structure(set_mask, outputs, masks)
    return Computed(loss, gradients, (inputs, targets, outputs, sample_weight), non_trainable, metrics, found)


def _keeping_variables_of(model: Any) -> AbstractContextManager[None]:
    return step_with(kept=set(map(id, model.non_trainable_variables)))


def _in_micro_batches(
    model: Any, state: Any, shards: Shards, data: tuple[Any, ...], split: Split, context: ReplicaContext | None
) -> Computed:
    """Computes the global batch in micro-batches, one after the other; equal ones run in one loop.

    Args:
        model: built and compiled.
        state: the values of its variables, in lists.
        shards: what the devices hold in parts.
        data: inputs, targets and sample weights, each device's rows as `Split.rows_of_process` says; and the indices.
        split: of the batch.
        context: of a pass over the whole batch; None on one device.
    """
    from kerasdp.portability.global_batch import joined_rows
    from kerasdp.portability.reduction import shares_of
    from kerasdp.portability.replica_context import FIRST

    rows, total_rows = data[:3], len(data[3])
    micro_batches = split.micro_batches(total_rows)
    counts = [sum(each.num_rows for each in replicas) for replicas in micro_batches]
    shares = shares_of(model, counts, is_weighted=rows[2] is not None, instead="leave out --accumulate")
    compute = _MicroBatch(model, state, shards, context or ReplicaContext(num_replicas=1), total_rows)
    size, num_full = micro_batches[0][0].size, counts.count(counts[0])

    def of_device(leaf: jax.Array) -> jax.Array:
        """Returns an axis of the devices, and then one of the rows of each: nothing moves between them."""
        return leaf.reshape(split.num_replicas, -1, *leaf.shape[1:])

    def one_by_one(leaf: jax.Array) -> jax.Array:
        own = of_device(leaf)[:, : num_full * size]
        own = own.reshape(split.num_replicas, num_full, size, *leaf.shape[1:]).swapaxes(0, 1)
        return own.reshape(num_full, split.num_replicas * size, *leaf.shape[1:])

    def step(carry: Any, micro_batch: Any) -> tuple[Any, Any]:
        number, own = micro_batch
        return compute(carry, own, number * counts[0], counts[0], shares[0])

    full = jax.tree.map(one_by_one, rows)
    numbers = jnp.arange(num_full, dtype="int32")
    carry, (losses, outputs) = jax.lax.scan(step, compute.begun(), (numbers, full), unroll=compute.is_written_out)
    loss = jnp.sum(losses)
    parts = [jax.tree.map(lambda leaf, number=number: leaf[number], (full, outputs)) for number in range(num_full)]
    if num_full < len(counts):
        last = jax.tree.map(
            lambda leaf: of_device(leaf)[:, num_full * size :].reshape(-1, *leaf.shape[1:])[: counts[-1]], rows
        )
        carry, (loss_of_last, outputs) = compute(carry, last, num_full * counts[0], counts[-1], shares[-1])
        loss, parts = loss + loss_of_last, [*parts, (last, outputs)]
    inputs, targets, sample_weight = joined_rows([own for own, _ in parts], counts, lambda *_: FIRST)
    outputs = joined_rows([outputs for _, outputs in parts], counts, compute.context.output_axis)
    gradients, non_trainable, metrics = carry
    return Computed(loss, gradients, (inputs, targets, outputs, sample_weight), non_trainable, metrics, {})


class _MicroBatch:
    """Computes one micro-batch after the other; what is carried: sums of gradients, and values of variables.

    Attributes:
        context: of all of them.
        is_written_out: whether the loop is written out. On the CPU XLA (jaxlib 0.10.2) computes a convolution within a
            loop with another kernel, which takes 15 times as long.
    """

    def __init__(self, model: Any, state: Any, shards: Shards, context: ReplicaContext, total_rows: int):
        from kerasdp.keras_compat.layers import seed_variables
        from kerasdp.portability.layer_calls import AddedLosses
        from kerasdp.portability.row_search import row_axes_of

        self.model, self.state, self.shards, axes = model, state, shards, row_axes_of(model)
        self._total_rows = total_rows
        self.context = dataclasses.replace(
            context, total_rows=total_rows, row_axes=axes, adds=AddedLosses(axes), is_micro_batch=True
        )
        seeds = {id(variable) for variable in seed_variables(model)}
        self.is_written_out = shards.replicated.mesh.devices.flat[0].platform == "cpu"
        self.seeds = [place for place, each in enumerate(model.non_trainable_variables) if id(each) in seeds]

    def begun(self) -> tuple[Any, Any, Any]:
        """Returns what is carried to the first one."""
        trainable, non_trainable, _, metrics = self.state
        return self.shards.cut([jnp.zeros_like(value) for value in trainable]), non_trainable, metrics

    def __call__(self, carry: Any, data: Any, first_row: Any, num_rows: int, share: float) -> tuple[Any, Any]:
        """Adds a micro-batch to what is carried; returns that, and its share of the loss, and its outputs."""
        import keras

        from kerasdp.keras_compat.models import losses_of_whole_batch

        model, (trainable, begun, optimizer, _), (sums, non_trainable, metrics) = self.model, self.state, carry
        non_trainable = [begun[place] if place in self.seeds else each for place, each in enumerate(non_trainable)]
        context = dataclasses.replace(
            self.context, num_rows=num_rows, rows=num_rows, first_row=first_row, calling=[], regularized={}, _calls={}
        )
        row_share, inputs = num_rows / self._total_rows, data[0]
        if self.is_written_out:
            inputs = _after(sums, inputs)

        def loss_and_updates(trainable: Any) -> tuple[Any, Any]:
            training = {"training": True} if "training" in model.call_signature_parameters else {}
            with use(context), _keeping_variables_of(model):
                outputs, new, penalties = model.stateless_call(
                    trainable, non_trainable, inputs, return_losses=True, **training
                )
            with losses_of_whole_batch(share / row_share):
                loss, new_metrics = _compiled_loss(model, metrics, data, outputs)
            loss = sum((jnp.sum(penalty) * row_share for penalty in penalties), loss * share)
            with keras.StatelessScope(list(zip(model.optimizer.variables, optimizer))):
                return model.optimizer.scale_loss(loss), (loss, outputs, new, new_metrics)

        compute = self.shards.gathering(loss_and_updates)
        gradients, (loss, outputs, new, metrics) = jax.grad(compute, has_aux=True)(trainable)
        return (self.shards.cut(jax.tree.map(jnp.add, sums, gradients)), new, metrics), (loss, outputs)


def _after(gradients: list[Any], inputs: Any) -> Any:
    """Returns inputs that are there once gradients are.

    XLA would otherwise make all forward passes first, and keep all that they leave. On the CPU (jaxlib 0.10.2) it
    forgets `jax.lax.optimization_barrier` before it orders operations; zeros of the gradients it must wait for.
    """
    zero = sum((0 * jnp.nan_to_num(gradient.ravel()[0]) for gradient in gradients), jnp.zeros(()))
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), inputs)


def _compiled_loss(model: Any, metrics: list[Any], data: Any, outputs: Any) -> tuple[Any, list[Any]]:
    """Computes the loss that `compile` made; returns it, and the new values of all metrics."""
    import keras

    from kerasdp.keras_compat.models import compiled_loss
    from kerasdp.portability.global_batch import refuse_masks
    from kerasdp.portability.random import portable_draws

    refuse_masks(model, outputs)
    compiled = compiled_loss(model)
    with keras.StatelessScope(list(zip(model.metrics_variables, metrics))) as scope, portable_draws("a loss"):
        loss = jnp.zeros(()) if compiled is None else compiled(data[1], outputs, data[2])
    return loss, [scope.get_current_value(variable) for variable in model.metrics_variables]


def _updated(model: Any, state: Any, gradients: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the new values of the trainable variables and of the optimizer's.

    `stateless_apply` wants all weights that the optimizer was built for; some may be frozen since, and then have no
    gradient. `apply` within a StatelessScope fails with LossScaleOptimizer, which assigns in branches (Keras 3.15).
    """
    from kerasdp.keras_compat.optimizers import weights_of_optimizer

    trainable, non_trainable, optimizer, _ = state
    if not gradients:
        return trainable, optimizer
    weights = weights_of_optimizer(model.optimizer)
    value_of = dict(zip(map(id, model.trainable_variables + model.non_trainable_variables), trainable + non_trainable))
    gradient_of = dict(zip(map(id, model.trainable_variables), gradients))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist for variables")
        values, optimizer = model.optimizer.stateless_apply(
            optimizer, [gradient_of.get(id(weight)) for weight in weights], [value_of[id(weight)] for weight in weights]
        )
    value_of |= dict(zip(map(id, weights), values))
    return [value_of[id(variable)] for variable in model.trainable_variables], optimizer
