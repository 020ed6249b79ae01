"""Reads the graph, losses and metrics of a Keras model, and hooks into its training steps.

With the hooks, kerasdp can compute the loss and metrics of `compile` for some rows of a batch. In user-defined steps,
the hooks replace methods of optimizers and metrics.
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
    """Returns a model itself if it is functional. For a built Sequential model, returns the functional model inside it.

    Returns None for any other model. In Keras 3.15, the class `keras.src.models.functional.Functional` and
    `Sequential._functional` are private.
    """
    if isinstance(model, keras.Sequential) and model.built:
        model = model._functional
    return model if isinstance(model, Functional) else None


def calls(model: keras.Model) -> list[Any] | None:
    """Returns the layer calls in the graph of a functional model, in an order in which they can run.

    The inputs of the model are left out. For any other kind of model, the result is None.

    Uses the private `Function._nodes_by_depth` of Keras 3.15, and `operation`, `arguments`, `input_tensors`, `outputs`
    and `is_input` of each node. No public API lists these calls.
    """
    by_depth = getattr(model, "_nodes_by_depth", None)
    if by_depth is None:
        return None
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def inputs_structure(model: keras.Model) -> Any:
    """Returns a functional model's inputs in their original structure: a tensor, list or dictionary.

    Uses the private `Function._inputs_struct` of Keras 3.15. In some cases, the public `input` is a flat list.
    """
    return model._inputs_struct


def outputs_structure(model: keras.Model) -> Any:
    """Returns a functional model's outputs in their original structure: a tensor, list or dictionary.

    Uses the private `Function._outputs_struct` of Keras 3.15. In some cases, the public `output` is a flat list.
    """
    return model._outputs_struct


def build_compiled(model: keras.Model, data: tuple[Any, Any, Any]) -> None:
    """Builds the layers, losses, metrics and optimizer of a compiled model that are not built yet.

    Uses the private `Trainer._symbolic_build` of Keras 3.15. No public call builds all of them without training.

    Args:
        model: a compiled model.
        data: `KerasTensor`s of inputs, targets and sample weights.
    """
    for training in (False, True):  # Keras tries only `training=False`
        if not all(layer.built for layer in all_layers(model)) and "training" in model.call_signature_parameters:
            # An error here is raised again below, with Keras' explanation. With `training=False`, no seed is drawn.
            with contextlib.suppress(Exception):
                backend.compute_output_spec(model, data[0], training=training)
    model._symbolic_build(data_batch=data)


def methods_through(others: dict[str, Callable[..., Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which methods of `keras.Model` are replaced, also for `super()` calls in subclasses.

    In Keras 3.15, `Model` inherits `fit`, `evaluate` and `predict` from the trainer of the backend, which has no hook.
    Scripts that call only the runner's methods do not need this context.

    Args:
        others: the replacements, by name of the method. The arguments of a replacement are Keras' method, the model,
            and the arguments of the call.
    """
    return wrapped(keras.Model, **others)


def made_by_compile(model: keras.Model) -> tuple[Any, Any]:
    """Returns the `CompileLoss` and `CompileMetrics` of a model; (None, None) before the first `compile`.

    Each `compile` creates new objects, so the objects show whether a model was compiled again.

    Uses the private `Trainer._compile_loss` and `_compile_metrics` of Keras 3.15. No public API returns these objects.
    """
    return model._compile_loss, model._compile_metrics


def compiled_metrics(model: keras.Model) -> list[tuple[str, keras.metrics.Metric]]:
    """Returns all metrics of `compile`, as pairs of a unique name and a metric.

    The name of a weighted metric begins with "weighted". If the model has several outputs, the name of the output
    follows.

    In Keras 3.15, a built `CompileMetrics` has the private `_flat_metrics` and `_flat_weighted_metrics`. Each list has
    one entry (or None) for each output. The public `CompileMetrics.metrics` does not show which metrics are weighted.
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
    """Returns the loss function that `compile(loss=)` made; None without a loss.

    The arguments of the function are targets, outputs and sample weights.

    Uses the private `Trainer._compile_loss` of Keras 3.15. The public `compute_loss` adds the penalties of the layers.
    """
    return model._compile_loss


def output_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the losses of the outputs of a compiled model; an empty list before the losses are built.

    Outputs without a loss are left out.

    Uses the private `CompileLoss._flat_losses` of Keras 3.15. The public `model.loss` is the argument of `compile`.
    """
    return [each.loss for each in getattr(model._compile_loss, "_flat_losses", None) or ()]


def loss_options(loss: keras.losses.Loss) -> dict[str, Any]:
    """Returns the arguments that a loss passes to its function, such as `axis` or `ignore_class`.

    Uses the private `LossFunctionWrapper._fn_kwargs` of Keras 3.15. In the public `get_config`, the names of these
    arguments depend on the class.
    """
    return getattr(loss, "_fn_kwargs", {})


def compute_loss(
    model: keras.Model, inputs: Any, targets: Any, outputs: Any, sample_weight: Any, *, training: bool
) -> Any:
    """Calls the public `model.compute_loss`, with `training` if the method has this argument.

    Uses the private `Trainer._compute_loss` of Keras 3.15. The steps of Keras also call `_compute_loss`.
    """
    return model._compute_loss(inputs, targets, outputs, sample_weight, training=training)


def restored_epoch(model: keras.Model) -> int | None:
    """Returns the epoch at which `keras.callbacks.BackupAndRestore` resumes a run; None without a resume.

    Uses the private `Trainer._initial_epoch` of Keras 3.15, which the callback sets at the start of training. No public
    API returns this epoch.
    """
    return model._initial_epoch


def set_training_mode(model: keras.Model, is_training: bool) -> None:
    """Sets the training mode of a model as a `torch.nn.Module`, like Keras' `fit` and `evaluate`; only on torch."""
    if keras.backend.backend() == "torch":
        model.train(is_training)


def flat_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Converts logs to the result of `evaluate` with `return_dict=False`.

    The result is one value, or a list of values in the order of the metrics.

    Uses the private `Trainer._flatten_metrics_in_order` of Keras 3.15. The public `metrics_names` differs from the
    names in the logs.
    """
    return model._flatten_metrics_in_order(logs)


def update_loss_metric(model: keras.Model, loss: Any, num_rows: int) -> None:
    """Adds the loss of a batch to the mean that Keras reports as `loss`.

    Uses the private `Trainer._loss_tracker` of Keras 3.15. The tracker is also the first entry of the public
    `model.metrics`. But `model.metrics` walks through all layers in each call, which is too slow for a training step.
    """
    model._loss_tracker.update_state(loss, sample_weight=num_rows)


def has_untold_loss(model: keras.Model) -> bool:
    """Returns whether no batch has updated the mean that Keras reports as `loss`. Keras then reports 0.0.

    This happens if a user-defined step returns its loss without updating the metric `loss`.

    Uses the private `Trainer._loss_tracker` of Keras 3.15.
    """
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None or all(metric is not tracker for metric in model.metrics):
        return False
    return not float(keras.ops.convert_to_numpy(tracker.count))


def metrics_of_ranks_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras on torch does not sum metrics over ranks.

    The metrics already cover the global batch.

    Keras 3.15 does not use process groups. Keras 3.16 (keras-team/keras #23316) does, in the trainer for torch. There,
    `get_metrics_result` sums all metric variables over the ranks, in training and evaluation. `_initialize_ddp` wraps
    the model in DistributedDataParallel, even if a callback predicts. The context replaces both methods in the class of
    the trainer, the first base of `keras.Model`. So the replacements also apply to a model that overrides these methods
    and calls `super()`. No public option turns the sum off.
    """
    trainer = keras.Model.__mro__[1]
    values = {
        "get_metrics_result": lambda model: super(trainer, model).get_metrics_result(),
        "_initialize_ddp": lambda model: None,
    }
    is_torch = keras.backend.backend() == "torch"
    return replaced(trainer, **{name: value for name, value in values.items() if is_torch and name in vars(trainer)})


def symbols_of(data: Any, num_rows: int) -> Any:
    """Returns `KerasTensor`s for a structure of arrays, with `num_rows` rows instead of the rows of the arrays.

    `num_rows` is the number of rows of the global batch. The arrays of one process may have fewer rows.
    """

    def symbol(leaf: Any) -> Any:
        if leaf is None:
            return None
        dtype = "string" if leaf.dtype.kind in "OSU" else str(leaf.dtype)
        return keras.KerasTensor((num_rows, *leaf.shape[1:]), dtype)

    return keras.tree.map_structure(symbol, data)


def output_symbols(model: keras.Model, data: tuple[Any, Any, Any]) -> Any:
    """Returns `KerasTensor`s of a model's outputs; None if its user-defined `call` does not accept `KerasTensor`s.

    If the shapes of the data do not fit the model and its losses, the errors of Keras are raised.

    Uses the private `keras.src.backend.compute_output_spec` of Keras 3.15, like Keras' trainer when it builds a model.
    The public `keras.Model.compute_output_spec` does not check the losses.

    Args:
        model: a built and compiled model.
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
    """Returns a name, the loss, the targets and the output for each loss of a compiled model.

    If the model has a single output, the name is empty. If targets and outputs cannot be paired by their paths, the
    list is empty.

    Uses the private `CompileLoss._flat_losses` of Keras 3.15, with `path`, `loss` and `name` of each loss. No public
    API pairs losses with targets.
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
    """Makes a callback that monitors a metric determine now whether lower values are better.

    In Keras 3.15, EarlyStopping and similar callbacks call the private `_set_monitor_op` after their first epoch. If
    lower values are better, `_set_monitor_op` flips the sign of `min_delta`. In a resumed run, the restored `min_delta`
    already has the flipped sign. A later call would flip the sign again. No public API sets the direction.
    """
    if getattr(callback, "monitor_op", callback) is None:
        callback._set_monitor_op()


def losses_of_whole_batch(factor: float = 1.0) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which Keras does not divide losses by the number of replicas of a `tf.distribute` strategy.

    In Keras 3.15, `scale_loss_for_distribution` and `unscale_loss_for_distribution` divide losses that are a mean. Both
    functions leave sums and user-defined losses unchanged. So no later factor would be right for all losses. This
    function wraps both once, permanently. No public option turns the division off.

    Args:
        factor: a factor for the mean loss that Keras reports for each output. The loss of an output is multiplied by
            `factor` when Keras updates this mean.
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
    """Returns the names of the steps that the model's class overrides: `train_step`, `test_step`, `predict_step`."""
    return {name for name in STEPS if getattr(type(model), name) is not getattr(keras.Model, name)}


def portable_steps(model: keras.Model) -> set[str]:
    """Returns the names of the overridden steps that take only the data.

    On jax, Keras' steps take the state as well.
    """
    return {name for name in own_steps(model) if _takes_data_alone(getattr(type(model), name))}


@functools.cache
def _takes_data_alone(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return len(parameters) == 2 and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


def as_keras_gives(data: Any) -> Any:
    """Packs inputs, targets and sample weights as Keras passes them to a step.

    Targets and sample weights that are None are left out. If floatx is float64, float32 data are cast to float64.
    Layers of Keras cast their inputs, but other code of a step does not.
    """
    if keras.config.floatx() == "float64":
        data = keras.tree.map_structure(_as_float64, tuple(data))
    return keras.utils.pack_x_y_sample_weight(*data)


def _as_float64(leaf: Any) -> Any:
    if leaf is None or keras.backend.standardize_dtype(leaf.dtype) != "float32":
        return leaf
    return keras.ops.cast(leaf, "float64") if keras.ops.is_tensor(leaf) else leaf.astype("float64")


def has_call(model: keras.Model) -> bool:
    """Returns whether a model defines `call`. A model with a custom `train_step` may not need `call`."""
    return type(model).call is not keras.Model.call


class _LossesOfThread(threading.local):
    """Stores the losses of a layer, in a separate list for each thread.

    TensorFlow traces replicas in threads, in turns.
    """

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.extend, self.clear = self.own.extend, self.own.clear

    def __getitem__(self, place: Any) -> Any:
        return self.own[place]


def losses_by_thread(layers: Iterable[keras.layers.Layer]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which each thread has a separate list of the losses that layers add.

    In Keras 3.15, the losses are in `Layer._losses`. Keras uses `extend`, `clear` and a slice of `_losses`. No public
    API separates the losses of threads.
    """
    return replaced_in_each((layer, {"_losses": _LossesOfThread()}) for layer in layers)


@contextlib.contextmanager
def hooked_steps(
    model: keras.Model,
    apply: Callable[..., Any],
    update_mean: Callable[..., Any],
    result: Callable[[Callable[[], Any]], Any],
) -> Iterator[None]:
    """Replaces methods of optimizers and metrics that a user-defined step calls, within the context.

    In Keras 3.15, user-defined steps call `Optimizer.apply` and metrics at any place, and Keras has no hook for these
    calls.

    Args:
        model: a model with user-defined steps. The context replaces `result` of its metrics, and stores the losses of
            its layers by thread.
        apply: the replacement of `apply` of all optimizers. It gets the original method and the arguments.
        update_mean: the replacement of `keras.metrics.Mean.update_state`. It gets the original method and the
            arguments.
        result: the replacement of `result` of metrics. It gets the original method and the arguments.
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
    """Restores attributes of a model at the end of the context, if they are numbers, strings or bools.

    The context is for a trial run of a user-defined step, which may count its calls in an attribute. Attributes of the
    class are not restored. The attributes are set with `object.__setattr__`, because Keras would track them. Keras 3.15
    cannot copy a model together with its state.
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
    """Makes `float` and `int` work for variables on several TensorFlow replicas, and allows bool variables in metrics.

    In Keras 3.15, `float` and `int` try to convert TensorFlow's mirrored variable, which fails. `Variable.__float__`
    and `__int__` are wrapped once, permanently, because there is no hook. `Metric.add_variable` is wrapped as well:
    Keras reads the variables of metrics as sums over the replicas, and TensorFlow (2.21) cannot sum bools.
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
    """Returns a context in which `reduce` computes each loss of `compile`.

    If `reduce` calls a loss, Keras computes that loss as usual. In Keras 3.15, `CompileLoss` pairs the losses with
    targets and outputs, and calls the losses. `CompileLoss` has no hook, so the public `Loss.__call__` is wrapped once,
    permanently.
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
    """Returns two lists of variables: of the mean losses of single outputs, and of the metrics of `compile`.

    Uses the private `Trainer._compile_loss` and `_compile_metrics` of Keras 3.15. The public `model.metrics` walks
    through all layers, and does not show whether a metric comes from `compile`.
    """
    return _variables(model._compile_loss), _variables(model._compile_metrics)


def _variables(compiled: Any) -> list[keras.Variable]:
    metrics = [] if compiled is None else compiled.metrics
    return [variable for metric in metrics for variable in metric.variables]


def update_compiled_metrics(model: keras.Model, targets: Any, outputs: Any, sample_weight: Any) -> None:
    """Updates the metrics of `compile` with a batch.

    Uses the private `Trainer._compile_metrics` of Keras 3.15. The public `compute_metrics` also computes the results of
    all metrics.
    """
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(targets, outputs, sample_weight)


def metric_function(metric: keras.metrics.Metric) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Returns the function whose mean a metric reports, and the arguments of that function.

    For other metrics, the result is (None, {}).

    Uses the private `MeanMetricWrapper._fn` and `_fn_kwargs` of Keras 3.15. The public `get_config` has both in
    serialized form.
    """
    return getattr(metric, "_fn", None), getattr(metric, "_fn_kwargs", {})


def is_metric_of_keras(function: Callable[..., Any]) -> bool:
    """Returns whether a function belongs to a metric of Keras. Such a function computes one value for each row.

    In Keras 3.15 these functions are in `keras.src.metrics`, for example `sparse_categorical_accuracy`. The public
    module has only classes.
    """
    return function.__module__.startswith("keras.src.metrics.")


def of_same_rank(values: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Adds or removes a last axis, so that loss values and sample weights have the same number of axes, as in Keras.

    Uses the private `squeeze_or_expand_to_same_rank` of Keras 3.15. Keras' `reduce_weighted_values` also begins with
    this function.
    """
    return loss_module.squeeze_or_expand_to_same_rank(values, sample_weight)
