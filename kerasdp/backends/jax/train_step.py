"""JAX: compiles the functions that train, test and predict with a model on all devices."""

import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kerasdp.backends.base import DeviceBatch, StepFunctions, Trained
from kerasdp.backends.steps import TrainedWeights, learning_rate, optimizers_of, variables_of_own_step
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


def make_step_functions(model: "keras.Model", shards: Shards, context: ReplicaContext | None) -> StepFunctions:
    """Makes jitted train, test and predict functions, again for each set of weights that is trained.

    Each is one program for the whole global batch, which XLA splits over the devices as inputs and variables are. The
    padding that makes the rows divide by the devices is removed INSIDE the program: within it XLA splits uneven shapes
    itself (only inputs and outputs must divide), so every layer, loss and metric sees the batch of one device.

    Args:
        model: built and compiled.
        shards: what the devices hold in parts.
        context: that of the layers in a training step.
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
            return _train_step(model, state, _cut(data), detail, shards)

    def on_state(step: Callable[..., Any], name: str) -> Callable[[Any], Any]:
        made: dict[tuple[bool, ...], Callable[[Any], Any]] = {}

        def run(data: Any) -> Any:
            key = weights.key()
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


def _train_step(model: Any, state: Any, data: tuple[Any, Any, Any], detail: Detail, shards: Shards) -> tuple[Any, Any]:
    """Trains on the global batch; returns its loss, learning rate, Keras' logs and what was observed, and the state.

    It is Keras' own step, in one program for all devices: XLA adds the sums over them. Keras' logs hold the mean of the
    epoch, so the loss of the batch is returned besides.
    """
    import keras

    from kerasdp.backends.observer import forward_pass, observed
    from kerasdp.keras_compat.layers import mask_of, set_mask
    from kerasdp.keras_compat.models import update_loss_metric

    trainable, non_trainable, optimizer, metrics = state
    inputs, targets, sample_weight = data

    def loss_and_updates(trainable: Any) -> tuple[Any, Any]:
        # What layers gave must leave through here: JAX lets nothing else out of a function that it differentiates.
        kept = step_with(kept=set(map(id, model.non_trainable_variables)))
        with forward_pass(detail, model, inputs) as found, kept:
            loss, updates = model.compute_loss_and_updates(
                trainable, non_trainable, metrics, *data, training=True, optimizer_variables=optimizer
            )
        # Only tensors leave, without the masks that layers have left at them.
        return loss, (updates, keras.tree.map_structure(mask_of, updates[1]), found)

    # Forward and backward pass.
    compute = shards.gathering(loss_and_updates)
    (_, (updates, masks, found)), gradients = jax.value_and_grad(compute, has_aux=True)(trainable)
    loss, outputs, non_trainable, metrics = updates
    outputs = keras.tree.map_structure(set_mask, outputs, masks)
    seen = observed(detail, gradients, found)
    # The update.
    with keras.StatelessScope(list(zip(model.optimizer.variables, optimizer))):
        rate = learning_rate(model.optimizer)
    trainable, optimizer = _updated(model, state, shards.cut(gradients))
    trainable = shards.cut(trainable)
    # The metrics.
    with keras.StatelessScope(list(zip(model.metrics_variables, metrics))) as scope:
        update_loss_metric(model, loss, jax.tree.leaves(inputs)[0].shape[0])
        logs = model.compute_metrics(inputs, targets, outputs, sample_weight)
    metrics = [scope.get_current_value(variable) for variable in model.metrics_variables]
    return (loss, rate, logs, seen), (trainable, non_trainable, optimizer, metrics)


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
