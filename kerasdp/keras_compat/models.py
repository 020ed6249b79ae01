"""Reads the graph, losses and metrics of a Keras model, and hooks into its training steps.

The loss and metrics of `compile` can be computed for some rows of a batch. In user-defined steps, the run handles the
calls of optimizers and metrics.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src import backend
from keras.src.losses import loss as loss_module
from keras.src.models.functional import Functional

from kerasdp.errors import RunError
from kerasdp.keras_compat.layers import all_layers
from kerasdp.keras_compat.optimizers import wrapped_apply
from kerasdp.keras_compat.patches import (
    current_step,
    replaced,
    replaced_in_each,
    step_with,
    wrap_for_good,
    wrapped,
)


def as_functional(model: keras.Model) -> keras.Model | None:
    """Returns the functional model behind a model: itself, or the one inside a Sequential model; None for other models.

    In Keras 3.15, the class `keras.src.models.functional.Functional` and `Sequential._functional` are private.
    """
    if isinstance(model, keras.Sequential) and model.built:
        model = model._functional
    return model if isinstance(model, Functional) else None


def calls(model: keras.Model) -> list[Any] | None:
    """Returns the layer calls of a functional model without its inputs, in an order in which they can run.

    Returns None for another kind of model.

    Uses the private `Function._nodes_by_depth` of Keras 3.15, and `operation`, `arguments`, `input_tensors`, `outputs`
    and `is_input` of each node. There is no public API for it.
    """
    by_depth = getattr(model, "_nodes_by_depth", None)
    if by_depth is None:
        return None
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def inputs_structure(model: keras.Model) -> Any:
    """Returns a functional model's inputs in their original structure: a tensor, list or dictionary.

    Uses the private `Function._inputs_struct` of Keras 3.15; the public `input` is flat in some cases.
    """
    return model._inputs_struct


def outputs_structure(model: keras.Model) -> Any:
    """Returns a functional model's outputs in their original structure: a tensor, list or dictionary.

    Uses the private `Function._outputs_struct` of Keras 3.15; the public `output` is flat in some cases.
    """
    return model._outputs_struct


def build_compiled(model: keras.Model, data: tuple[Any, Any, Any]) -> None:
    """Builds the unbuilt layers, losses, metrics and optimizer of a compiled model.

    Uses the private `Trainer._symbolic_build` of Keras 3.15. Without training, no public call builds all of them.

    Args:
        model: compiled.
        data: `KerasTensor`s of inputs, targets and sample weights.
    """
    for training in (False, True):  # Keras tries only `training=False`
        if not all(layer.built for layer in all_layers(model)) and "training" in model.call_signature_parameters:
            # An error here comes again below, with Keras' explanation. `training=False` draws no seed.
            with contextlib.suppress(Exception):
                backend.compute_output_spec(model, data[0], training=training)
    model._symbolic_build(data_batch=data)


def methods_through(others: dict[str, Callable[..., Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which methods of `keras.Model` are replaced; `super()` in a subclass calls the replacement.

    In Keras 3.15, `Model` inherits `fit`, `evaluate` and `predict` from the trainer of the backend, which has no hook.
    Scripts that call only the runner's methods do not need this.

    Args:
        others: by name of the method, a function that gets Keras' method, the model and the arguments.
    """
    return wrapped(keras.Model, **others)


def made_by_compile(model: keras.Model) -> tuple[Any, Any]:
    """Returns the `CompileLoss` and `CompileMetrics` of a model; (None, None) before the first `compile`.

    Each `compile` makes new objects. So they show whether a model was compiled again.

    Uses the private `Trainer._compile_loss` and `_compile_metrics` of Keras 3.15; there is no public API for it.
    """
    return model._compile_loss, model._compile_metrics


def compiled_metrics(model: keras.Model) -> list[tuple[str, keras.metrics.Metric]]:
    """Returns pairs of a unique name and a metric of `compile`.

    Names begin with "weighted" for weighted metrics, and with the output if the model has several.

    In Keras 3.15, a built `CompileMetrics` has the private `_flat_metrics` and `_flat_weighted_metrics`. Each list has
    one entry (or None) for each output. The public `CompileMetrics.metrics` does not separate the two kinds.
    """
    metrics = model._compile_metrics
    if metrics is None or not metrics.built:
        return []
    found = []
    for kind, outputs in (([], metrics._flat_metrics), (["weighted"], metrics._flat_weighted_metrics)):
        for place, output in enumerate(outputs):
            # Keras adds a number to the name of an unnamed output, and each process has another number.
            where = [*kind, output.output_name or "output", str(place)] if output and len(outputs) > 1 else kind
            found += [("/".join((*where, metric.name)), metric) for metric in (output.metrics if output else ())]
    return found


def compiled_loss(model: keras.Model) -> Callable[..., Any] | None:
    """Returns the function of targets, outputs and sample weights that `compile(loss=)` made; None without a loss.

    Uses the private `Trainer._compile_loss` of Keras 3.15. The public `compute_loss` adds the penalties of the layers.
    """
    return model._compile_loss


def output_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the loss of each output of a compiled model that has one; empty before the losses are built.

    Uses the private `CompileLoss._flat_losses` of Keras 3.15. The public `model.loss` is the argument of `compile`.
    """
    return [each.loss for each in getattr(model._compile_loss, "_flat_losses", None) or ()]


def loss_options(loss: keras.losses.Loss) -> dict[str, Any]:
    """Returns the arguments that a loss passes to its function, such as `axis` or `ignore_class`.

    Uses the private `LossFunctionWrapper._fn_kwargs` of Keras 3.15. The public `get_config` has other names for them in
    each class.
    """
    return getattr(loss, "_fn_kwargs", {})


def compute_loss(
    model: keras.Model, inputs: Any, targets: Any, outputs: Any, sample_weight: Any, *, training: bool
) -> Any:
    """Calls the public `model.compute_loss`, with `training` if it has this argument.

    Uses the private `Trainer._compute_loss` of Keras 3.15, which Keras' steps call as well.
    """
    return model._compute_loss(inputs, targets, outputs, sample_weight, training=training)


def restored_epoch(model: keras.Model) -> int | None:
    """Returns the epoch at which `keras.callbacks.BackupAndRestore` resumes a training; None if it does not.

    Uses the private `Trainer._initial_epoch` of Keras 3.15, which the callback sets at the start of training. There is
    no public API for it.
    """
    return model._initial_epoch


def set_training_mode(model: keras.Model, is_training: bool) -> None:
    """Sets the training mode of the model's `torch.nn.Module` on torch, as Keras' `fit` and `evaluate` do."""
    if keras.backend.backend() == "torch":
        model.train(is_training)


def flat_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Converts logs to the result of `evaluate` without `return_dict`: one value, or a list in the order of metrics.

    Uses the private `Trainer._flatten_metrics_in_order` of Keras 3.15. The public `metrics_names` differs from the
    names in the logs.
    """
    return model._flatten_metrics_in_order(logs)


def update_loss_metric(model: keras.Model, loss: Any, num_rows: int) -> None:
    """Adds the loss of a batch to the mean that Keras reports as `loss`.

    Uses the private `Trainer._loss_tracker` of Keras 3.15. It is also the first entry of the public `model.metrics`.
    That walks through all layers in each call, which is too slow for a training step.
    """
    model._loss_tracker.update_state(loss, sample_weight=num_rows)


def has_untold_loss(model: keras.Model) -> bool:
    """Returns whether the mean that Keras reports as `loss` has no batch in it; Keras then reports 0.0.

    This happens if a user-defined step returns its loss without updating the metric.

    Uses the private `Trainer._loss_tracker` of Keras 3.15.
    """
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None or all(metric is not tracker for metric in model.metrics):
        return False
    return not float(keras.ops.convert_to_numpy(tracker.count))


def metrics_of_ranks_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras on torch does not sum metrics over ranks.

    They cover the global batch already.

    Keras 3.15 does not know process groups. In Keras 3.16 (keras-team/keras #23316), the trainer for torch, the first
    base of `keras.Model`, does. `get_metrics_result` sums all metric variables over the ranks, in training and
    evaluation. `_initialize_ddp` wraps the model in DistributedDataParallel, also when a callback predicts. Both are
    replaced in that class: `super()` in a model that overrides them finds the replacement. No public option changes
    this.
    """
    trainer = keras.Model.__mro__[1]
    values = {
        "get_metrics_result": lambda model: super(trainer, model).get_metrics_result(),
        "_initialize_ddp": lambda model: None,
    }
    is_torch = keras.backend.backend() == "torch"
    return replaced(trainer, **{name: value for name, value in values.items() if is_torch and name in vars(trainer)})


def symbols_of(data: Any, num_rows: int) -> Any:
    """Returns `KerasTensor`s for a structure of arrays, with the number of rows of the global batch.

    A process may hold fewer rows.
    """

    def symbol(leaf: Any) -> Any:
        if leaf is None:
            return None
        dtype = "string" if leaf.dtype.kind in "OSU" else str(leaf.dtype)
        return keras.KerasTensor((num_rows, *leaf.shape[1:]), dtype)

    return keras.tree.map_structure(symbol, data)


def output_symbols(model: keras.Model, data: tuple[Any, Any, Any]) -> Any:
    """Returns `KerasTensor`s of a model's outputs; None if its user-defined `call` does not accept `KerasTensor`s.

    Raises the errors of Keras for data whose shapes do not fit the model and its losses.

    Uses the private `keras.src.backend.compute_output_spec` of Keras 3.15, with which its trainer builds a model. The
    public `keras.Model.compute_output_spec` does not check the losses.

    Args:
        model: built and compiled.
        data: `KerasTensor`s of inputs, targets and sample weights, with the rows of one batch.
    """
    inputs, targets, sample_weight = data
    try:
        outputs = backend.compute_output_spec(model, inputs, training=False)
    except Exception:
        if as_functional(model) is None:
            return None
        raise
    if model._compile_loss is not None:
        backend.compute_output_spec(model._compile_loss, targets, outputs, sample_weight)
    return outputs


def targets_of_losses(model: keras.Model, targets: Any, outputs: Any) -> list[tuple[str, Any, Any, Any]]:
    """Returns name, loss, targets and output for each loss of a compiled model; the name is "" with a single output.

    The list is empty if targets and outputs cannot be paired by their paths.

    Uses the private `CompileLoss._flat_losses` of Keras 3.15, with `path`, `loss` and `name` of each; there is no
    public API for it.
    """
    losses = getattr(model._compile_loss, "_flat_losses", None) or ()
    if isinstance(outputs, (list, tuple)) and isinstance(targets, dict):
        targets = [targets.get(name) for name in model.output_names]
    found = []
    for each in losses:
        target, output = targets, outputs
        try:
            for key in each.path:
                target, output = target[key], output[key]
        except (KeyError, IndexError, TypeError):
            return []
        if keras.tree.is_nested(target) or keras.tree.is_nested(output):
            return []
        found.append((each.name if each.path else "", each.loss, target, output))
    return found


def set_monitor_direction(callback: keras.callbacks.Callback) -> None:
    """Makes a callback that monitors a metric decide now whether lower values are better.

    In Keras 3.15, EarlyStopping and similar callbacks call the private `_set_monitor_op` after their first epoch. It
    flips the sign of `min_delta`. In a resumed run it would flip the restored, already flipped value. There is no
    public API for it.
    """
    if getattr(callback, "monitor_op", callback) is None:
        callback._set_monitor_op()


def losses_of_whole_batch(factor: float = 1.0) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras does not divide losses by the number of replicas of a `tf.distribute` strategy.

    In Keras 3.15, `scale_loss_for_distribution` and `unscale_loss_for_distribution` divide losses that are a mean. They
    do not divide sums and user-defined losses, so no later factor would be right for all losses. Both are wrapped once,
    permanently. There is no public API for it.

    `factor`: multiplies the loss of each output before Keras adds it to the mean of that loss.
    """
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        wrap_for_good(loss_module, name, functools.partial(_unless_whole_batch, name.startswith("unscale")))
    return step_with(factor=factor)


def _unless_whole_batch(is_for_means: bool, scale: Callable[[Any], Any], value: Any) -> Any:
    factor = current_step().factor
    if factor is None:
        return scale(value)
    return value * factor if is_for_means and factor != 1.0 else value


STEPS = ("train_step", "test_step", "predict_step")


def own_steps(model: keras.Model) -> set[str]:
    """Returns which of `train_step`, `test_step` and `predict_step` the model's class overrides."""
    return {name for name in STEPS if getattr(type(model), name) is not getattr(keras.Model, name)}


def portable_steps(model: keras.Model) -> set[str]:
    """Returns which overridden steps take only the data; on jax, Keras' steps take the state as well."""
    return {name for name in own_steps(model) if _takes_data_alone(getattr(type(model), name))}


@functools.cache
def _takes_data_alone(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return len(parameters) == 2 and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


def as_keras_gives(data: Any) -> Any:
    """Packs inputs, targets and sample weights as Keras passes them to a step, without those that are None.

    With floatx float64, it casts float32 data to float64. Keras' layers would cast their inputs themselves.
    """
    if keras.config.floatx() == "float64":
        data = keras.tree.map_structure(_as_float64, tuple(data))
    return keras.utils.pack_x_y_sample_weight(*data)


def _as_float64(leaf: Any) -> Any:
    if leaf is None or keras.backend.standardize_dtype(leaf.dtype) != "float32":
        return leaf
    return keras.ops.cast(leaf, "float64") if keras.ops.is_tensor(leaf) else leaf.astype("float64")


def has_call(model: keras.Model) -> bool:
    """Returns whether a model defines `call`; a model with a custom `train_step` may not need it."""
    return type(model).call is not keras.Model.call


class _LossesOfThread(threading.local):
    """Stores a layer's losses, one list for each thread: TensorFlow traces replicas in threads, in turns."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.extend, self.clear = self.own.extend, self.own.clear

    def __getitem__(self, place: Any) -> Any:
        return self.own[place]


def losses_by_thread(layers: Iterable[keras.layers.Layer]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which each thread has a separate list of the losses that layers add.

    In Keras 3.15, the losses are in `Layer._losses`, of which Keras uses `extend`, `clear` and a slice. There is no
    public API for it.
    """
    return replaced_in_each((layer, {"_losses": _LossesOfThread()}) for layer in layers)


@contextlib.contextmanager
def hooked_steps(
    model: keras.Model,
    apply: Callable[..., Any],
    update_mean: Callable[..., Any],
    result: Callable[[Callable[[], Any]], Any],
) -> Iterator[None]:
    """Replaces the optimizer and metric methods that a user-defined step calls, within the context.

    In Keras 3.15, user-defined steps call `Optimizer.apply` and metrics at any place, and Keras has no hook for this.

    Args:
        model: its steps are user-defined. `result` of its metrics is replaced, and its layers' losses are stored by
            thread.
        apply: replaces `apply` of all optimizers; gets the original method and its arguments.
        update_mean: replaces `keras.metrics.Mean.update_state`; gets the original method and its arguments.
        result: replaces `result` of metrics; gets the original method and its arguments.
    """
    with (
        wrapped_apply(apply),
        wrapped(keras.metrics.Mean, update_state=update_mean),
        losses_by_thread(all_layers(model)),
        replaced_in_each((metric, {"result": functools.partial(result, metric.result)}) for metric in model.metrics),
    ):
        yield


@contextlib.contextmanager
def plain_attributes_kept(model: keras.Model) -> Iterator[None]:
    """Restores the attributes of a model that are numbers, strings or bools, at the end of the context.

    For a trial run of a user-defined step, which may count its calls in an attribute. Attributes of the class are not
    restored. The attributes are set without Keras, which would track them. Keras 3.15 cannot copy a model together with
    its state.
    """

    def plain() -> dict[str, Any]:
        return {key: value for key, value in vars(model).items() if isinstance(value, (bool, int, float, str))}

    kept = plain()
    try:
        yield
    finally:
        for key in plain().keys() - kept.keys():
            object.__delattr__(model, key)
        for key, value in kept.items():
            object.__setattr__(model, key, value)


def numbers_of_mirrored_variables() -> None:
    """Makes `float` and `int` work for Keras variables of several replicas, and allows bool variables in metrics.

    In Keras 3.15, `float` and `int` convert TensorFlow's mirrored variable, which fails. `Variable.__float__` and
    `__int__` are wrapped once, permanently, because there is no hook. So is `Metric.add_variable`: its variables are
    read as the sum over the replicas, and TensorFlow (2.21) cannot sum bools.
    """
    wrap_for_good(keras.metrics.Metric, "add_variable", _without_sum_of_bools)
    for name, kind in (("__float__", float), ("__int__", int)):
        wrap_for_good(keras.Variable, name, functools.partial(_number, kind))


def _without_sum_of_bools(
    add: Callable[..., Any], metric: keras.metrics.Metric, shape: Any, initializer: Any, dtype: Any = None,
    aggregation: str = "sum", name: str | None = None,
) -> Any:  # fmt: skip
    return add(metric, shape, initializer, dtype, "only_first_replica" if dtype == "bool" else aggregation, name)


def _number(kind: type, original: Callable[..., Any], variable: keras.Variable) -> Any:
    return original(variable) if variable.ndim else kind(keras.ops.convert_to_numpy(variable))


# Reduces a loss: called with the loss, targets, outputs and sample weights.
Reduce = Callable[[keras.losses.Loss, Any, Any, Any], Any]


@contextlib.contextmanager
def reducing_losses(reduce: Reduce) -> Iterator[None]:
    """Returns a context in which `reduce` is called instead of each loss; losses that `reduce` calls run normally.

    In Keras 3.15, `CompileLoss` pairs the losses with targets and outputs, and calls them. It has no hook, so the
    public `Loss.__call__` is wrapped once, permanently.
    """
    wrap_for_good(keras.losses.Loss, "__call__", _reduced)
    try:
        with step_with(reduce=reduce):
            yield
    except ValueError as error:
        # Keras 3.16 raises a longer error instead, with this one as its cause.
        if isinstance(error.__cause__, RunError):
            raise error.__cause__ from None
        raise


def _reduced(call: Callable[..., Any], loss: keras.losses.Loss, y_true: Any, y_pred: Any, weights: Any = None) -> Any:
    reduce = current_step().reduce
    if reduce is None:
        return call(loss, y_true, y_pred, weights)
    with step_with(reduce=None):
        return reduce(loss, y_true, y_pred, weights)


def compiled_variables(model: keras.Model) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Returns the variables of `compile` in two lists: for the losses of single outputs, and for its metrics.

    Uses the private `Trainer._compile_loss` and `_compile_metrics` of Keras 3.15. The public `model.metrics` walks
    through all layers, and does not show where a metric is from.
    """
    return _variables(model._compile_loss), _variables(model._compile_metrics)


def _variables(compiled: Any) -> list[keras.Variable]:
    metrics = [] if compiled is None else compiled.metrics
    return [variable for metric in metrics for variable in metric.variables]


def update_compiled_metrics(model: keras.Model, targets: Any, outputs: Any, sample_weight: Any) -> None:
    """Updates the metrics of `compile` with a batch.

    Uses the private `Trainer._compile_metrics` of Keras 3.15. The public `compute_metrics` also computes all results.
    """
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(targets, outputs, sample_weight)


def metric_function(metric: keras.metrics.Metric) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Returns the function whose mean a metric reports, and its arguments; (None, {}) for other metrics.

    Uses the private `MeanMetricWrapper._fn` and `_fn_kwargs` of Keras 3.15. The public `get_config` has them in
    serialized form.
    """
    return getattr(metric, "_fn", None), getattr(metric, "_fn_kwargs", {})


def is_metric_of_keras(function: Callable[..., Any]) -> bool:
    """Returns whether a function belongs to a metric of Keras, which computes one value for each row.

    In Keras 3.15 these are in `keras.src.metrics`, such as `sparse_categorical_accuracy`. The public module has only
    classes.
    """
    return function.__module__.startswith("keras.src.metrics.")


def of_same_rank(values: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Adds or removes the last axis of loss values or weights, as Keras does, so that their ranks match.

    Uses the private `squeeze_or_expand_to_same_rank` of Keras 3.15, which `reduce_weighted_values` calls first.
    """
    return loss_module.squeeze_or_expand_to_same_rank(values, sample_weight)
