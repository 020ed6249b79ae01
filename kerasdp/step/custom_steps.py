"""Runs a user-defined `train_step` or `test_step` on each replica's rows, and combines the results.

Each replica runs the step on its rows as if they were the whole batch. Before an optimizer gets gradients, the
gradients are averaged over the replicas, weighted by rows. Metrics are combined, too. If the losses are means over
rows, the result is the same as for the whole batch. Before the first step, trials on a few rows find the rows in the
tensors of the step, and the objects that the step uses. The trials change no variable.
"""

import contextlib
import dataclasses
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import InnerScope, all_layers, is_next_value, raw_value
from kerasdp.keras_compat.models import as_keras_gives, hooked_steps, losses_of_whole_batch, plain_attributes_kept
from kerasdp.keras_compat.numerics import same_on_all_backends
from kerasdp.keras_compat.optimizers import wrapped_apply
from kerasdp.keras_compat.patches import current_step, step_with
from kerasdp.same import replica_context
from kerasdp.same.layer_calls import hook_layers
from kerasdp.same.random import UNNAMED, portable_draws
from kerasdp.same.replica_context import RowLayout, use
from kerasdp.step.row_search import (
    RowSearch,
    explaining_trial,
    fixed_values,
    rows_of,
    search_rows,
    trial_context,
)

Tensor = Any
# A value that a trial of a step recorded, after its name.
Found = tuple[str, Tensor | None]


@dataclasses.dataclass(kw_only=True)
class Share:
    """Describes a replica's share of a global batch, and combines values of all replicas.

    Args:
        rows: the number of rows of this replica.
        total_rows: the number of rows of all replicas.
        build: a function that builds an optimizer once for all replicas.
        add_up: a function that sums each tensor of a list over the replicas.
        is_trial: whether this step is a trial. In a trial, optimizers change nothing.
        found: the records of a trial for the global batch, as pairs of a name and a value: the gradients that reached
            an optimizer, and the changes of the metrics' variables.
        results: the results of metrics within the step, each with a function that computes the result again.
        declared: the values returned by the step that are not means.
    """

    rows: int
    total_rows: int
    build: Callable[[keras.optimizers.Optimizer, list[Any]], None]
    add_up: Callable[[list[Tensor]], list[Tensor]] = list  # of a replica that has all rows
    is_trial: bool = False
    found: list[Found] = dataclasses.field(default_factory=list)
    results: list[tuple[Tensor, Callable[[], Tensor]]] = dataclasses.field(default_factory=list)
    declared: list[Tensor] = dataclasses.field(default_factory=list)

    def of_all(self, sums: list[Tensor | None], means: Sequence[Tensor | None] = ()) -> list[Tensor | None]:
        """Sums and averages tensors over the replicas, with one message for each dtype.

        The averages are weighted by rows. A replica without real rows contributes zeros. For None, the result is None.

        Args:
            sums: the tensors to sum.
            means: the tensors to average.
        """
        own = [*sums, *(None if tensor is None else tensor * (self.rows / self.total_rows) for tensor in means)]
        present = [ops.convert_to_tensor(tensor) for tensor in own if tensor is not None]
        own_share = [tensor if self.rows else ops.zeros_like(tensor) for tensor in present]
        found = iter(self.add_up(own_share) if present else [])
        return [None if tensor is None else next(found) for tensor in own]

    def mean(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Averages tensors over the replicas, weighted by their rows."""
        return self.of_all([], tensors)


@contextlib.contextmanager
def join_steps(model: keras.Model) -> Iterator[None]:
    """Makes optimizers and metrics use the `Share` of the current step within this context."""
    clipping = importlib.import_module(f"kerasdp.backends.{keras.backend.backend()}.gradients")
    hooks = hooked_steps(model, _apply_means, _update_by_rows, _remember_result)
    with hooks, clipping.clipping_means(_means_of_clipped):
        yield


def run(model: keras.Model, name: str, data: Any, share: Share) -> dict[str, Any]:
    """Runs a user-defined step, and returns its logs for the global batch. Must be called within `join_steps`.

    Args:
        model: the model whose metrics the step updates.
        name: the name of the step, such as `"train_step"`.
        data: this replica's rows: inputs, targets and sample weights, without padding.
        share: the share of this replica.
    """
    variables = model.metrics_variables
    before = [ops.copy(variable) for variable in variables]
    with step_with(share=share):
        logs = getattr(model, name)(as_keras_gives(data))
    changes = [variable - value for variable, value in zip(variables, before)]
    # The result of a metric is computed again; other values are averaged.
    found = [
        (value, next((again for known, again in share.results if known is value), None))
        for value in keras.tree.flatten(logs)
    ]
    joined = iter(share.of_all(changes, [value for value, again in found if again is None]))
    if share.is_trial:
        share.found += [(f"change of metric {variable.path}", next(joined)) for variable in variables]
        if getattr(model, "checks_results", False):
            share.found += [("value that it returns", value) for value in (*joined, *share.declared)]
        return logs
    for variable, value in zip(variables, before):
        variable.assign(value + next(joined))
    return keras.tree.pack_sequence_as(logs, [next(joined) if again is None else again() for _, again in found])


def run_on_shard(
    model: keras.Model,
    name: str,
    batch: tuple[Any, Any, Any],
    context: replica_context.ReplicaContext,
    add_up: Callable[[list[Tensor]], list[Tensor]],
    build: Callable[[keras.optimizers.Optimizer, list[Any]], None],
    is_trial: bool = False,
) -> tuple[dict[str, Any], list[Found]]:
    """Runs a user-defined step on a replica's shard of a batch. Must be called within `join_steps`.

    Args:
        model: the user's model.
        name: the name of the step, such as `"train_step"`.
        batch: inputs, targets and sample weights of the replica's padded shard.
        context: the context of the shard.
        add_up: see `Share`.
        build: see `Share`.
        is_trial: see `Share`.

    Returns:
        A tuple of the logs and the records, for the global batch. Only a trial has records; see `Share.found`.
    """
    context = context.of_real_rows()
    rows = context.rows or 0  # a replica without real rows has one padding row
    data = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:rows], batch)
    share = Share(
        rows=context.num_rows, total_rows=context.total_rows or 0, add_up=add_up, build=build, is_trial=is_trial
    )
    context.calling.append(model)
    with use(context):
        logs = run(model, name, data, share)
    return logs, share.found


def _means_of_clipped(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Averages gradients over the replicas before a step clips the gradients.

    Later, the gradients of all replicas are averaged again for the optimizer. This does not change them, because they
    are equal by then.
    """
    share = current_step().share
    return gradients if share is None else share.mean(gradients)


def _apply_means(apply: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    share = current_step().share
    if share is None:
        return apply(optimizer, grads, trainable_variables)
    if keras.backend.backend() == "tensorflow":
        grads = importlib.import_module("kerasdp.backends.tensorflow.gradients").dense(list(grads))
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
        if not optimizer.built:
            share.build(optimizer, trainable_variables)
    if share.is_trial:
        names = [getattr(variable, "path", variable.name) for variable in trainable_variables or ()]
        means = zip(names or itertools.repeat(optimizer.name), share.mean(list(grads)))
        share.found += [(f"gradient of {name}", mean) for name, mean in means]
        return None
    with step_with(share=None):  # a LossScaleOptimizer calls an inner optimizer
        return apply(optimizer, share.mean(list(grads)), trainable_variables)


def _update_by_rows(update: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """Updates a metric with a scalar, or with a value for each row.

    A scalar is weighted by this replica's share of the rows. Values for each row need no weight.
    """
    share = current_step().share
    if share is not None and sample_weight is None and not len(ops.shape(ops.convert_to_tensor(values))):
        sample_weight = share.rows / share.total_rows
    return update(metric, values, sample_weight)


def _remember_result(result: Callable[[], Any]) -> Any:
    value, share = result(), current_step().share
    if share is not None and isinstance(value, dict):
        share.results += [(leaf, lambda name=name: result()[name]) for name, leaf in value.items()]
    elif share is not None:
        share.results.append((value, result))
    return value


def title_of(model: keras.Model, name: str) -> str:
    """Returns the name of a model's step for use in messages."""
    return getattr(model, "title", f"{name} of {type(model).__name__}")


def refuse_next_values(model: keras.Model, what: str, instead: str) -> None:
    """Raises `UserError` if a model has float8 variables.

    The gradient of a float8 variable is the next value of the variable. To compute this value, the whole batch is
    needed.

    Args:
        model: a built model.
        what: the feature that trains the model without the whole batch, for the message.
        instead: advice for the user, for the message.
    """
    for variable in filter(is_next_value, model.trainable_variables):
        raise UserError(
            f"{what}: expected no float8 variables, because their next values need the whole batch. Received: "
            f"{variable.path} of {model.name}; {instead}"
        )


def find_rows_of_step(
    model: keras.Model,
    name: str,
    data: Any,
    strategy: Any,
    will_be_checked: bool = False,
) -> None:
    """Finds where the rows of a batch are in the tensors of a user-defined step.

    `row_layout_of` returns the result. The step runs twice: on `NUM_ROWS` rows, and on half of these rows. The model
    does not change.

    Args:
        model: a built model, after a call of `portable`.
        name: the name of the step.
        data: `NUM_ROWS` samples as NumPy arrays: inputs, targets and sample weights.
        strategy: the strategy of the run.
        will_be_checked: whether a later check would detect a wrong result. If so, the search may guess where
            the rows are.

    Raises:
        UserError: if the rows cannot be found, because the step mixes the samples of a batch.
    """

    def call(search: RowLayout, rows: slice) -> None:
        left = [search]  # for the first replica of this process; the others see the same
        run_trial = _trial_of(model, name, rows_of(data, rows), strategy)

        def run_in_replica() -> None:
            with use(trial_context(left.pop() if left else RowSearch(), rows, is_custom_step=True)):
                run_trial()

        with leave_unchanged(model), explaining_trial(title_of(model, name), rows.stop - rows.start):
            strategy.each_replica(run_in_replica)

    search_rows(model, name, call, will_be_checked)


def _trial_of(model: keras.Model, name: str, data: tuple[Any, Any, Any], strategy: Any) -> Callable[[], list[Found]]:
    """Returns a function that runs a trial of a step on a whole batch. Call the function within a replica.

    In a trial, optimizers do not update weights. The function returns the records of the trial: see `Share`.
    """
    num_rows, build = len(keras.tree.flatten(data)[0]), strategy.shard_steps(model).build_optimizer

    def run_trial() -> list[Found]:
        share = Share(rows=num_rows, total_rows=num_rows, build=build, is_trial=True)
        with portable_draws(UNNAMED):
            run(model, name, data, share)
        return share.found

    return run_trial


@contextlib.contextmanager
def leave_unchanged(model: keras.Model) -> Iterator[None]:
    """Restores a model after trial steps, when the context ends.

    Variables and plain attributes (for example a counter of steps) are restored. Metrics are reset.
    """
    model.reset_metrics()
    values = fixed_values(model)
    try:
        with plain_attributes_kept(model), join_steps(model), same_on_all_backends():
            yield
    finally:
        model.reset_metrics()
        for variable, value in values:
            variable.assign(value)
            if getattr(variable.value, "grad", None) is not None:  # torch: not every step starts by zeroing it
                variable.value.grad = None


def try_whole_step(model: keras.Model, data: tuple[Any, Any, Any], strategy: Any) -> list[Found]:
    """Runs a trial of a model's custom `train_step` on a whole batch. Must be called within `leave_unchanged`.

    In a trial, optimizers do not update weights.

    Args:
        model: see `find_rows_of_step`.
        data: see `find_rows_of_step`. Any number of samples is allowed.
        strategy: see `find_rows_of_step`.

    Returns:
        The records of the trial: see `Share`.
    """
    run_trial = _trial_of(model, "train_step", rows_of(data, slice(None)), strategy)

    def run_in_replica() -> list[Found]:
        with losses_of_whole_batch():
            return run_trial()

    return strategy.each_replica(run_in_replica)[0]


@dataclasses.dataclass(kw_only=True)
class StepParts:
    """Holds the layers, optimizers, metrics and variables that a user-defined step uses.

    Attributes:
        layers: the layers that the step calls. Layers that are called within these layers are left out.
        optimizers: the optimizers that apply gradients, each with the weights to which it applies gradients.
        metrics: the metrics whose variables the step uses.
        variables: all other variables that the step reads or assigns.
    """

    layers: list[keras.layers.Layer]
    optimizers: list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]]
    metrics: list[keras.metrics.Metric]
    variables: list[keras.Variable]


class _Recording(InnerScope):
    """Records the variables that code within this scope reads or assigns, in the dictionary `used` by `id`."""

    def __init__(self, used: dict[int, keras.Variable]):
        super().__init__()
        self.used = used

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        self.used.setdefault(id(update[0]), update[0])
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        if raw_value(variable) is None:  # Keras creates it when the scope ends
            raise UserError(
                f"the step creates the variable {variable.path}; create and build all variables, layers and metrics "
                "before the first step"
            )
        self.used.setdefault(id(variable), variable)
        return super().get_current_value(variable)


def find_parts(
    step: Callable[[Any], Any], data: Any, run_in_replicas: Callable[[Callable[[], None]], Any], name: str = UNNAMED
) -> StepParts:
    """Runs a step, and returns the layers, optimizers, metrics and variables that the step uses.

    No variable changes. Optimizers are not built, and do not update weights.

    Args:
        step: the user-defined step.
        data: a few samples as NumPy arrays, in the structure that the step takes.
        run_in_replicas: the method `each_replica` of a `kerasdp.contract.Strategy`.
        name: the name of the code that draws random values: see `portable_draws`.

    Raises:
        UserError: if the step creates a variable.
    """
    calls: dict[int, keras.layers.Layer] = {}
    applied: dict[int, tuple[Any, list[Any]]] = {}
    used: dict[int, keras.Variable] = {}

    def record(layer: keras.layers.Layer, outputs: Any) -> None:
        calls.setdefault(id(layer), layer)

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        applied.setdefault(id(optimizer), (optimizer, list(trainable_variables or ())))

    def run() -> None:
        with step_with(record=record), _Recording(used), portable_draws(name):
            step(rows_of(data, slice(None)))

    hook_layers()
    with wrapped_apply(apply), same_on_all_backends():
        run_in_replicas(run)
    inner = {id(part) for layer in calls.values() for part in all_layers(layer, include_self=False)}
    layers = [layer for key, layer in calls.items() if key not in inner]
    optimizers = list(applied.values())
    metrics = [each for each in _living(keras.metrics.Metric) if any(id(own) in used for own in each.variables)]
    known = {
        id(variable) for part in (*layers, *metrics, *(one for one, _ in optimizers)) for variable in part.variables
    }
    variables = [variable for key, variable in used.items() if key not in known]
    return StepParts(layers=layers, optimizers=optimizers, metrics=metrics, variables=variables)


def _living(kind: type) -> list[Any]:
    """Returns all living objects of a class, in the order of their creation.

    Keras (3.15) keeps no list of these objects.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
