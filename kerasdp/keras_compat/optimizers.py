"""Reads and changes the variables of Keras optimizers, and the way in which optimizers apply gradients."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from kerasdp.keras_compat.layers import is_of_keras
from kerasdp.keras_compat.patches import in_place_of, replaced, replaced_in_each, wrapped


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that a `LossScaleOptimizer` wraps. Any other optimizer, or None, is returned unchanged."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def learning_rate_schedule(optimizer: Any) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns the schedule of an optimizer's learning rate; None for a fixed rate.

    Uses the private `Optimizer._learning_rate` of Keras 3.15. The public `learning_rate` is the current value of the
    schedule. The public `get_config` serializes the schedule. To serialize, Keras imports TensorFlow if TensorFlow is
    installed.
    """
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def weights_of_optimizer(optimizer: Any) -> list[Any]:
    """Returns the weights for which an optimizer was built, in the order of the optimizer.

    Uses the private `Optimizer._trainable_variables` of Keras 3.15. No public API lists these weights.
    """
    return list(inner_optimizer(optimizer)._trainable_variables)


def weights_unknown_to(optimizer: Any, weights: list[Any]) -> list[Any]:
    """Returns the given weights for which an optimizer was not built.

    The public `apply` of Keras 3.15 raises an error for such a weight too late, after the rest of the step has run. The
    message of this error contains all values of the weight.
    """
    known = {id(weight) for weight in weights_of_optimizer(optimizer)}
    return [weight for weight in weights if id(weight) not in known]


def slots_of(optimizer: Any, num_weights: int) -> dict[tuple[str, int], keras.Variable]:
    """Returns an optimizer's variables for single weights (such as momentums), by kind and index of the weight.

    In Keras 3.15, an attribute of the optimizer holds a list with one variable for each weight, in the order of the
    weights. The kind is the name of that attribute. The public `variables` is one flat list, whose order differs
    between optimizers.
    """
    return {
        (name, place): variable
        for name, variables in vars(inner_optimizer(optimizer)).items()
        if isinstance(variables, list) and len(variables) == num_weights
        and name not in ("_variables", "_trainable_variables")
        for place, variable in enumerate(variables)
        if hasattr(variable, "assign")
    }  # fmt: skip


def slots_by_weight(optimizer: Any) -> dict[int, tuple[str, Any]]:
    """Returns the kind and the weight of each optimizer variable that belongs to a weight, by `id` of the variable.

    A user-defined optimizer may not store its variables in lists. Then this function finds the weight by name:
    `add_variable_from_reference` puts the path of the weight into the name of the variable.
    """
    weights = weights_of_optimizer(optimizer)
    slots = {
        id(variable): (name.lstrip("_"), weights[place])
        for (name, place), variable in slots_of(optimizer, len(weights)).items()
    }
    by_path: dict[str, list[Any]] = {}
    for weight in weights:
        by_path.setdefault(weight.path.replace("/", "_"), []).append(weight)
    num_found: dict[str, int] = {}
    for variable in optimizer.variables:
        path = max((path for path in by_path if variable.name.startswith(f"{path}_")), key=len, default=None)
        if id(variable) in slots or path is None:
            continue
        place = num_found.get(variable.name, 0)  # several weights may share a path
        num_found[variable.name] = place + 1
        if place < len(by_path[path]):
            slots[id(variable)] = variable.name.removeprefix(f"{path}_"), by_path[path][place]
    return slots


def global_clipnorm(optimizer: Any) -> float | None:
    """Returns the norm to which an optimizer clips all gradients together; None without `global_clipnorm`.

    The norm applies to the full gradients, even if each replica holds only shards of gradients.
    """
    return inner_optimizer(optimizer).global_clipnorm


def updating_some(optimizer: Any, weights: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which an optimizer updates the weights of one pipeline stage.

    The gradients must be clipped before, because the context turns off `global_clipnorm`. In Keras 3.15 on torch, an
    update fails if the optimizer has weight decay, but excludes all given weights from it. In that case, the context
    also turns off weight decay. The private `Optimizer._use_weight_decay` shows which weights are excluded. No public
    API shows this.
    """
    inner = inner_optimizer(optimizer)
    decays = inner.weight_decay is not None and any(inner._use_weight_decay(weight) for weight in weights)
    return replaced(inner, global_clipnorm=None, weight_decay=inner.weight_decay if decays else None)


def updating_parts(
    optimizer: Any, is_cut: Callable[[Any], bool], counts_wholes: bool, add_up: Callable[[Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which an optimizer updates shards of weights, and clips by the norms of full gradients.

    The context replaces `_clip_gradients` and `LossScaleOptimizer.check_finite` of Keras 3.15. These methods see only
    the shards of this process. No public API clips shards by the norms of full gradients. The formulas are the same as
    in `_clip_by_norm` and `clip_by_global_norm`.

    Args:
        optimizer: a built optimizer.
        is_cut: a function that returns whether a weight is sharded.
        counts_wholes: whether this process adds the unsharded gradients to the sum of squares. Every process holds the
            unsharded gradients, so exactly one process must add them.
        add_up: a function that sums a tensor over the processes.
    """
    inner = inner_optimizer(optimizer)

    def clip(gradients: list[Any], weights: list[Any]) -> list[Any]:
        limit = inner.clipnorm or inner.global_clipnorm
        if not limit or not gradients:
            return clip_as_keras(gradients)
        squares = [
            ops.sum(ops.square(gradient)) * float(counts_wholes or is_cut(weight))
            for gradient, weight in zip(gradients, weights)
        ]
        sums = add_up(ops.stack(squares))
        if inner.clipnorm:
            norms = ops.sqrt(sums)
            return [gradient * limit / ops.maximum(norms[place], limit) for place, gradient in enumerate(gradients)]
        norm = ops.sqrt(ops.sum(sums))
        scale = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)  # NaN if the norm is not finite
        return [gradient * scale for gradient in gradients]

    def apply(gradients: list[Any], weights: list[Any]) -> None:
        with replaced(inner, _clip_gradients=lambda own: clip(own, weights)):
            apply_as_keras(gradients, weights)

    clip_as_keras, apply_as_keras = inner._clip_gradients, inner._backend_apply_gradients
    changes: list[tuple[Any, dict[str, Any]]] = [(inner, {"_backend_apply_gradients": apply})]
    if inner is not optimizer:
        check = optimizer.check_finite
        odd = lambda gradients: ops.cast(ops.logical_not(check(gradients)), "float32")  # noqa: E731
        changes.append((optimizer, {"check_finite": lambda gradients: ops.equal(add_up(odd(gradients)), 0.0)}))
    return replaced_in_each(changes)


def wrapped_apply(apply: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the `apply` method of all optimizers is wrapped.

    In Keras 3.15, user-defined steps call the public `apply` of any optimizer, and Keras has no hook before this call.
    `LossScaleOptimizer` has a separate `apply`, which calls the `apply` of the optimizer inside it. On torch, all
    optimizers derive from a class of the backend, and that class has no `apply`.

    Args:
        apply: the wrapper. Its arguments are Keras' method, the optimizer, and the arguments of the call.
    """
    kinds = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    return replaced_in_each((kind, {"apply": in_place_of(kind.apply, apply)}) for kind in kinds)


def applying_in_scope() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which all optimizers can apply gradients within a `StatelessScope`, on jax.

    In Keras 3.15, `LossScaleOptimizer.apply` assigns to variables in branches, which fails in a scope. The context
    replaces it by the public `stateless_apply`, which works in a scope.
    """

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if inner_optimizer(optimizer) is optimizer or trainable_variables is None:
            return original(optimizer, grads, trainable_variables)
        weights = list(trainable_variables)
        values = [variable.value for variable in optimizer.variables], list(grads), [each.value for each in weights]
        for variables, new in zip((weights, optimizer.variables), optimizer.stateless_apply(*values)):
            for variable, value in zip(variables, new):
                variable.assign(value)
        return None

    return wrapped_apply(apply)


def no_gradient_sum() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which optimizers on TensorFlow do not sum gradients over replicas a second time.

    In Keras 3.15, `_all_reduce_sum_gradients` runs too late: clipping and loss scaling would see the gradients of a
    single replica. No public option turns this sum off. The context patches the class, so that contexts can be nested:
    a callback of `fit` may call `evaluate`.
    """
    as_they_are: Callable[..., Any] = lambda _, optimizer, gradients_and_variables: gradients_and_variables  # noqa: E731
    return wrapped(keras.optimizers.Optimizer, _all_reduce_sum_gradients=as_they_are)


def updating_one_by_one(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which an optimizer on torch updates one variable after the other, as on other backends.

    In Keras 3.15, optimizers for torch override `_backend_update_step` to update all variables in one call. These
    optimizers read the learning rate as a Python float. Such a read waits for the device, and a CUDA graph cannot
    capture it. No public option restores the general method.
    """

    def one_by_one(one: Any) -> Callable[..., None]:
        steps = (
            vars(kind)["_backend_update_step"]
            for kind in type(one).__mro__
            if "_backend_update_step" in vars(kind) and ".backend.torch." not in kind.__module__
        )
        return types.MethodType(next(steps), one)

    optimizers = {optimizer, inner_optimizer(optimizer)} - {None}  # with the one in a LossScaleOptimizer
    return replaced_in_each((one, {"_backend_update_step": one_by_one(one)}) for one in optimizers)


def updating_at_once(optimizer: Any, kernel: Callable[..., None]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Adam, AdamW and SGD on torch update all weights in one call.

    Other optimizers do not change. In Keras 3.15, `_backend_update_step` of the optimizers for torch makes about twelve
    calls, each for all weights. No public option reduces the number of calls. The formulas come from `torch_adam.py`
    and `torch_sgd.py`.

    Args:
        optimizer: any optimizer.
        kernel: a function that updates weights of one dtype. Its first four arguments are lists of weights, gradients,
            momentums and velocities. The next three arguments are the learning rate, the factor of weight decay (or
            None), and a list of bools that says which weights decay. The last argument is a list of floats: momentum
            and `nesterov` for SGD; both betas and epsilon for Adam.
    """
    is_sgd = isinstance(optimizer, keras.optimizers.SGD)
    is_adam = isinstance(optimizer, keras.optimizers.Adam) and not optimizer.amsgrad
    if not is_of_keras(type(optimizer)) or not (is_sgd or is_adam):
        return contextlib.nullcontext()

    def update(gradients: list[Any], weights: list[Any], learning_rate: Any) -> None:
        for dtype in dict.fromkeys(weight.dtype for weight in weights):
            own, given = zip(*(pair for pair in zip(weights, gradients) if pair[0].dtype == dtype))
            places = list(map(optimizer._get_variable_index, own))
            decay, rate = None, ops.cast(learning_rate, dtype)
            if optimizer.weight_decay is not None:
                decay = ops.cast(1 - optimizer.weight_decay * learning_rate, dtype)
            if is_sgd:
                slots = [optimizer.momentums if optimizer.momentum else [], []]
                numbers = [optimizer.momentum, float(optimizer.nesterov)]
            else:
                slots = [optimizer._momentums, optimizer._velocities]
                numbers = [optimizer.beta_1, optimizer.beta_2, optimizer.epsilon]
                step = ops.cast(optimizer.iterations + 1, dtype)
                power_1, power_2 = (ops.power(ops.cast(beta, dtype), step) for beta in numbers[:2])
                rate = rate * ops.sqrt(1 - power_2) / (1 - power_1)
            lists = [[each[place].value for place in places] if each else [] for each in slots]
            decays = [decay is not None and optimizer._use_weight_decay(weight) for weight in own]
            kernel([weight.value for weight in own], list(given), *lists, rate, decay, decays, numbers)

    return replaced(optimizer, _backend_update_step=update, _apply_weight_decay=lambda weights: None)


def has_branches(optimizer: Any) -> bool:
    """Returns whether an optimizer has a branch that runs only in some steps, and in which replicas communicate.

    This is the case with `gradient_accumulation_steps`, and with `ema_overwrite_frequency`. With a
    `LossScaleOptimizer`, the replicas communicate before the branch, so the result is False.
    """
    if inner_optimizer(optimizer) is not optimizer:  # with a LossScaleOptimizer they communicate before
        return False
    return bool(optimizer.gradient_accumulation_steps or (optimizer.use_ema and optimizer.ema_overwrite_frequency))


def overrides_nothing_of_tensorflow(optimizer: Any) -> bool:
    """Returns whether the class of an optimizer overrides none of the methods that `updating_values` replaces."""
    return all(getattr(type(optimizer), name) is own for name, (own, _) in _tensorflow_methods().items())


def updating_values(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which an optimizer on TensorFlow updates values in a `keras.StatelessScope`.

    In Keras 3.15, methods of `TFOptimizer` work only with TensorFlow's variables, not with values. In this context, the
    methods of `BaseOptimizer` replace these methods. `BaseOptimizer` uses a branch for gradient accumulation, and a
    branch for overwriting weights with their averages. Values that are assigned in a scope do not leave a branch, so
    the context computes both outcomes of these branches. No public API replaces the methods.
    """
    methods: dict[str, Callable[..., Any]] = {
        name: types.MethodType(general, optimizer) for name, (_, general) in _tensorflow_methods().items()
    }
    keys = {id(variable): optimizer._var_key(variable) for variable in optimizer._trainable_variables}
    methods["_var_key"] = lambda variable: keys.get(id(variable))
    methods["_backend_apply_gradients"] = functools.partial(_apply_without_branch, optimizer)
    return replaced(optimizer, **methods)


def _tensorflow_methods() -> dict[str, tuple[Any, Any]]:
    """Returns, by name, pairs of an optimizer method for TensorFlow and the general method that it overrides."""
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    own, general = vars(TFOptimizer), vars(BaseOptimizer)
    names = [name for name in own if isinstance(general.get(name), types.FunctionType) and name != "__init__"]
    return {name: (own[name], general[name]) for name in names}


def _apply_without_branch(optimizer: Any, gradients: list[Any], weights: list[Any]) -> None:
    """Does the same as `BaseOptimizer._backend_apply_gradients` without a branch.

    Both outcomes of a branch are computed, and one of them is selected.
    """

    def update(gradients: list[Any]) -> None:
        clipped = optimizer._clip_gradients(gradients)
        optimizer._apply_weight_decay(weights)
        optimizer._backend_update_step(clipped, weights, optimizer.learning_rate)

    if steps := optimizer.gradient_accumulation_steps:
        is_time = ops.equal((optimizer._iterations + 1) % steps, 0)  # the public `iterations` counts updates
        kept = [optimizer._accumulated_gradients[optimizer._get_variable_index(weight)] for weight in weights]
        sums = [gradient + so_far for gradient, so_far in zip(gradients, kept)]
        _update_if(is_time, optimizer, weights, lambda: update([each / steps for each in sums]))
        for variable, value in zip(kept, sums):
            variable.assign(ops.where(is_time, ops.zeros_like(value), value))
    else:
        update(gradients)
    if optimizer.use_ema:
        every, trained = optimizer.ema_overwrite_frequency, optimizer._trainable_variables
        optimizer._update_model_variables_moving_average(trained)
        for weight, average in zip(trained, optimizer._model_variables_moving_average) if every else ():
            weight.assign(ops.where(ops.equal((optimizer.iterations + 1) % every, 0), average, weight))


def _update_if(condition: Any, optimizer: Any, weights: list[Any], update: Callable[[], None]) -> None:
    """Runs an optimizer update, and keeps the new values of variables only if `condition` is true.

    Args:
        condition: a scalar tensor.
        optimizer: a built optimizer.
        weights: the weights that `update` changes.
        update: a function that assigns to the weights and to the optimizer's variables.
    """
    held = list({id(one): one for one in (*optimizer.variables, *weights)}.values())
    # A scope does not read values of the scope around it (Keras 3.15).
    before = [(variable, variable.value) for variable in held]
    with keras.StatelessScope(before) as updated:
        update()
    for variable, value in before:
        new = updated.get_current_value(variable)
        if new is not value:
            variable.assign(ops.where(condition, new, value))


@contextlib.contextmanager
def deciding_on_device(optimizer: Any) -> Iterator[None]:
    """Returns a context in which a `LossScaleOptimizer` updates without a branch, in a `keras.StatelessScope`.

    In Keras 3.15, `_common_apply` has a branch on whether the gradients are finite. On torch, the branch waits for the
    device, and a CUDA graph cannot capture it. On TensorFlow, the branch also waits for the device, and `_tf_apply`
    leaves the replica context to run it. In this context, both outcomes are computed and one is selected. User-defined
    subclasses of `LossScaleOptimizer` do not change. No public API avoids the branch.
    """
    if inner_optimizer(optimizer) is optimizer or not is_of_keras(type(optimizer)):
        yield
        return

    def apply(gradients: list[Any], trainable_variables: list[Any] | None = None) -> None:
        weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        _apply(optimizer, gradients, weights)

    with replaced(optimizer, _common_apply=apply, _tf_apply=apply):
        yield


def _apply(optimizer: Any, gradients: list[Any], weights: list[Any]) -> None:
    """Does the same as `LossScaleOptimizer._common_apply`, without a branch.

    In Keras 3.15, `_overwrite_variable_with_gradient` returns whether the gradient of a variable is its next value.
    Such a gradient is not divided by the loss scale.
    """
    is_finite, scale = optimizer.check_finite(gradients), optimizer.dynamic_scale
    unscaled = [
        gradient
        if gradient is None or optimizer._overwrite_variable_with_gradient(weight)
        else ops.divide(gradient, scale)
        for gradient, weight in zip(gradients, weights)
    ]
    inner = optimizer.inner_optimizer
    _update_if(is_finite, inner, weights, lambda: inner.apply(unscaled, trainable_variables=weights))
    count = optimizer.step_counter
    is_time_to_grow = ops.equal(count, optimizer.dynamic_growth_steps - 1)
    grown = ops.where(is_time_to_grow, ops.multiply(scale, 2.0), scale)
    new_scale = ops.where(is_finite, grown, ops.multiply(scale, 0.5))
    starts_anew = ops.logical_or(ops.logical_not(is_finite), is_time_to_grow)
    new_count = ops.where(starts_anew, ops.zeros_like(count), ops.add(count, 1))
    optimizer.dynamic_scale.assign(new_scale)
    optimizer.step_counter.assign(ops.cast(new_count, count.dtype))
