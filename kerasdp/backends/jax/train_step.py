"""JAX: compiles the functions that train, test and predict with a model on all devices."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from kerasdp.backends.base import DeviceBatch, StepFunctions
from kerasdp.backends.steps import (
    TrainedWeights,
    all_variables,
    learning_rate,
    next_batches,
    require_device_batch,
    train_on_next_batches,
)
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.run_state import Detail, RunState

if TYPE_CHECKING:
    import keras


def make_step_functions(
    model: "keras.Model", run_state: RunState, copied: NamedSharding, context: ReplicaContext | None
) -> StepFunctions:
    """Makes jitted train, test and predict functions for Keras' `fit`, again for each set of weights that is trained.

    Args:
        model: built and compiled.
        run_state: of the run.
        copied: the sharding of variables that have none yet.
        context: that of the layers in a training step.
    """
    made: dict[tuple[bool, ...], StepFunctions] = {}
    weights = TrainedWeights(model)
    # What no process has the whole of, none can read.
    results = None if copied.is_fully_addressable else copied
    # Now: within `fit`, Keras takes the values out of the variables.
    shardings = {id(variable): _sharding_of(variable, copied) for variable in all_variables(model)}

    def functions() -> StepFunctions:
        key = weights.key()
        if key not in made:
            made[key] = _for_trained_weights(model, run_state, shardings, context, results)
        return made[key]

    return StepFunctions(
        train=lambda state, iterator: functions().train(state, iterator),
        test=lambda state, iterator: functions().test(state, iterator),
        predict=lambda state, iterator: functions().predict(state, iterator),
    )


def _for_trained_weights(
    model: "keras.Model",
    run_state: RunState,
    shardings: dict[int, NamedSharding],
    context: ReplicaContext | None,
    results: NamedSharding | None,
) -> StepFunctions:
    """Makes jitted train, test and predict functions for the weights that are trained now.

    Each is one program for the whole global batch, which XLA splits over the devices as inputs and variables are. The
    padding that makes the rows divide by the devices is removed INSIDE the program: within it XLA splits uneven shapes
    itself (only inputs and outputs must divide), so every layer, loss and metric sees the batch of one device.

    Args:
        shardings: of all variables, by their id.
        results: the sharding of logs and outputs; None: whatever JAX chooses. Others: see `make_step_functions`.
    """
    from kerasdp.keras_compat.own_steps import own_steps

    own = own_steps(model)
    state_shardings = _in_order_of_state(model, shardings)
    trainable, non_trainable, _, metrics = state_shardings

    def train_step(detail: Detail, state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
        with use(context):
            if "train_step" in own:
                logs, state = model.train_step(state, _packed(data))
                return (logs.get("loss"), None, logs, {}), state
            return _train_step(model, state, _cut(data), detail)

    jit = functools.partial(_jit, model, results)
    jitted_train_steps = jit(_several(functools.partial(train_step, Detail.NOTHING)), state_shardings)
    jitted_train_step = {detail: jit(functools.partial(train_step, detail), state_shardings) for detail in Detail}
    jitted_test_step = jit(functools.partial(_test_step, model), (trainable, non_trainable, metrics))
    jitted_predict_step = jit(functools.partial(_predict_step, model), (trainable, non_trainable))

    def train_function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        def train_one(detail: Detail, batch: DeviceBatch) -> Any:
            nonlocal state
            outputs, state = jitted_train_step[detail](state, batch)
            return outputs

        def train_several(batches: list[DeviceBatch]) -> Any:
            nonlocal state
            outputs, state = jitted_train_steps(state, batches)
            return outputs

        logs = train_on_next_batches(iterator, model, run_state, train_one, train_several)
        return logs, state

    def test_function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        for batch in next_batches(iterator, model):
            logs, state = jitted_test_step(state, batch)
        return logs, state

    return StepFunctions(
        train=train_function,
        test=test_function,
        predict=lambda state, iterator: jitted_predict_step(state, require_device_batch(next(iterator))),
    )


def _test_step(model: "keras.Model", state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
    return model.test_step(state, _packed(data))


def _predict_step(model: "keras.Model", state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
    outputs, non_trainable_variables = model.predict_step(state, _packed((data[0], None, None, data[3])))
    return outputs, (state[0], non_trainable_variables)


def _jit(
    model: "keras.Model", results: NamedSharding | None, step: Callable[..., Any], state_shardings: tuple[Any, ...]
) -> Callable[..., Any]:
    """Compiles a step by JAX's own compiler, or leaves it eager, as Keras decides for its own functions."""
    if not model.run_eagerly and model.jit_compile:
        step = jax.jit(step, donate_argnums=0, out_shardings=(results, state_shardings))
    last_state = None  # the state after the last step, which Keras hands back as it is

    def run(state: Any, data: tuple[Any, ...]) -> tuple[Any, Any]:
        nonlocal last_state
        if state is not last_state:  # the first one; or a callback has set variables
            state = jax.device_put(state, state_shardings)
        outputs, last_state = step(state, data)
        return outputs, last_state

    return run


def _sharding_of(variable: "keras.Variable", copied: NamedSharding) -> NamedSharding:
    """Returns the sharding of a variable.

    For a value that is on one device without having been sent there, as that of a new variable or a reset metric,
    JAX (0.10.2) compiles another program: it would compile the first training step three times.
    """
    sharding = variable.value.sharding
    return sharding if isinstance(sharding, NamedSharding) else copied


def _in_order_of_state(model: "keras.Model", shardings: dict[int, NamedSharding]) -> tuple[list[NamedSharding], ...]:
    """Returns the shardings of a model's variables, in the four lists of Keras' state."""
    optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        [] if optimizer is None else optimizer.variables,
        model.metrics_variables,
    )
    return tuple([shardings[id(variable)] for variable in variables] for variables in lists)


def _several(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Trains on several batches of one shape; returns their losses and rates, and the last one's logs."""

    def step(state: Any, batch: DeviceBatch) -> tuple[Any, Any]:
        (loss, rate, logs, _), state = train_step(state, batch)
        return state, (loss, rate, logs)

    def train_steps(state: Any, batches: list[DeviceBatch]) -> tuple[Any, Any]:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        state, (losses, rates, logs) = jax.lax.scan(step, state, stacked)
        return (losses, rates, jax.tree.map(lambda leaf: leaf[-1], logs)), state

    return train_steps


def _cut(data: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Inputs, targets and sample weights without their padding."""
    inputs, targets, sample_weight, indices = data
    return jax.tree.map(lambda leaf: leaf[: len(indices)], (inputs, targets, sample_weight))


def _packed(data: tuple[Any, ...]) -> Any:
    """Returns the same as Keras hands it to a step."""
    from kerasdp.keras_compat.own_steps import as_keras_gives

    return as_keras_gives(_cut(data))


def _train_step(model: Any, state: Any, data: tuple[Any, Any, Any], detail: Detail) -> tuple[Any, Any]:
    """Runs Keras' training step, and also returns this batch's loss (Keras' logs hold the epoch's mean) and rate."""
    import keras

    from kerasdp.backends.observer import forward_pass, observed, watched_layers
    from kerasdp.keras_compat.layers import mask_of, set_mask
    from kerasdp.keras_compat.models import update_loss_metric
    from kerasdp.portability.random import keeping_only

    trainable, non_trainable, optimizer, metrics = state
    inputs, targets, sample_weight = data

    def loss_and_updates(trainable: Any) -> tuple[Any, Any]:
        # What layers gave must leave through here: JAX lets nothing else out of a function that it differentiates.
        kept = keeping_only(model.non_trainable_variables)
        with watched_layers(detail, model), forward_pass(detail, inputs) as found, kept:
            loss, updates = model.compute_loss_and_updates(
                trainable, non_trainable, metrics, *data, training=True, optimizer_variables=optimizer
            )
        # Only tensors leave, without the masks that layers have left at them.
        return loss, (updates, keras.tree.map_structure(mask_of, updates[1]), found)

    (_, (updates, masks, found)), gradients = jax.value_and_grad(loss_and_updates, has_aux=True)(trainable)
    loss, outputs, non_trainable, metrics = updates
    outputs = keras.tree.map_structure(set_mask, outputs, masks)
    seen = observed(detail, gradients, found)
    with keras.StatelessScope(list(zip(model.optimizer.variables, optimizer))):
        rate = learning_rate(model.optimizer)
    trainable, optimizer = _updated(model, state, gradients)
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
