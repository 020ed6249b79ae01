"""Reads what a Keras model knows of its graph and its outputs, and of what `compile` made; takes part in its steps.

Loss and metrics of `compile` can be computed of some rows of a batch. What user-defined steps do with optimizers and
metrics goes through the run.
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
    """Returns the model whose graph of calls is known: itself, or that within a Sequential one; else None.

    Keras 3.15: `keras.src.models.functional.Functional`, which has no public name, and `Sequential._functional`.
    """
    if isinstance(model, keras.Sequential) and model.built:
        model = model._functional
    return model if isinstance(model, Functional) else None


def calls(model: keras.Model) -> list[Any] | None:
    """Returns the calls of a functional model's layers, inputs left out, in an order in which they can be made.

    Keras 3.15: `Function._nodes_by_depth`; of a node are used `operation`, `arguments`, `input_tensors`, `outputs` and
    `is_input`. None for a model of another kind. No public way.
    """
    by_depth = getattr(model, "_nodes_by_depth", None)
    if by_depth is None:
        return None
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def inputs_structure(model: keras.Model) -> Any:
    """Returns a functional model's inputs as they were given to it: a tensor, list or dictionary.

    Keras 3.15: `Function._inputs_struct`; the public `input` is flat in some cases.
    """
    return model._inputs_struct


def outputs_structure(model: keras.Model) -> Any:
    """Returns a functional model's outputs as they were given to it.

    Keras 3.15: `Function._outputs_struct`; the public `output` is flat in some cases.
    """
    return model._outputs_struct


def build_compiled(model: keras.Model, data: tuple[Any, Any, Any]) -> None:
    """Builds all that is not built yet of a compiled model: layers, losses, metrics, optimizer.

    Keras 3.15: `Trainer._symbolic_build`; no public call does all of it without training.

    Args:
        model: compiled.
        data: `KerasTensor`s of inputs, targets and sample weights.
    """
    for training in (False, True):  # Keras asks for `training=False` alone
        if not all(layer.built for layer in all_layers(model)) and "training" in model.call_signature_parameters:
            # What fails here fails below, too, where Keras says why. With `training=False` no seed is drawn.
            with contextlib.suppress(Exception):
                backend.compute_output_spec(model, data[0], training=training)
    model._symbolic_build(data_batch=data)


def methods_through(others: dict[str, Callable[..., Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which methods of all models are others; `super()` of those that override them finds these.

    Keras 3.15: `Model` has `fit` and its like from the trainer of the backend; no hook. Unneeded where scripts call
    the runner's methods alone.

    Args:
        others: by name of the method, a function that gets Keras' own, the model and the arguments.
    """
    return wrapped(keras.Model, **others)


def made_by_compile(model: keras.Model) -> tuple[Any, Any]:
    """Returns `CompileLoss` and `CompileMetrics`, new objects after each `compile`; (None, None) before the first.

    Keras 3.15: `Trainer._compile_loss`, `_compile_metrics`; no public way to see that a model was compiled again.
    """
    return model._compile_loss, model._compile_metrics


def compiled_metrics(model: keras.Model) -> list[tuple[str, keras.metrics.Metric]]:
    """Returns the metrics of `compile` with their names, after "weighted" and the output where there are such.

    Keras 3.15: `CompileMetrics._flat_metrics` and `_flat_weighted_metrics`, an entry (or None) an output, are there
    once it is built. The public `CompileMetrics.metrics` does not tell one from the other.
    """
    metrics = model._compile_metrics
    if metrics is None or not metrics.built:
        return []
    found = []
    for kind, outputs in (([], metrics._flat_metrics), (["weighted"], metrics._flat_weighted_metrics)):
        for place, output in enumerate(outputs):
            # Outputs without a name of their own differ by a number that Keras gives, another in each process.
            where = [*kind, output.output_name or "output", str(place)] if output and len(outputs) > 1 else kind
            found += [("/".join((*where, metric.name)), metric) for metric in (output.metrics if output else ())]
    return found


def compiled_loss(model: keras.Model) -> Callable[..., Any] | None:
    """Returns the function of targets, outputs and sample weights that `compile(loss=)` made; None without a loss.

    Keras 3.15: `Trainer._compile_loss`. The public `compute_loss` adds penalties, and reads them off the layers.
    """
    return model._compile_loss


def output_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the losses of a compiled model, one an output that has one; empty as long as they are not built.

    Keras 3.15: `CompileLoss._flat_losses`; the public `model.loss` is what the user wrote.
    """
    return [each.loss for each in getattr(model._compile_loss, "_flat_losses", None) or ()]


def loss_options(loss: keras.losses.Loss) -> dict[str, Any]:
    """Returns the arguments that a loss hands to its function, as `axis` or `ignore_class`.

    Keras 3.15: `LossFunctionWrapper._fn_kwargs`; the public `get_config` names them otherwise in each class.
    """
    return getattr(loss, "_fn_kwargs", {})


def compute_loss(
    model: keras.Model, inputs: Any, targets: Any, outputs: Any, sample_weight: Any, *, training: bool
) -> Any:
    """Calls the public `model.compute_loss`, with `training` if it takes that.

    Keras 3.15: `Trainer._compute_loss`, by which its own steps call it.
    """
    return model._compute_loss(inputs, targets, outputs, sample_weight, training=training)


def restored_epoch(model: keras.Model) -> int | None:
    """Returns the epoch at which `keras.callbacks.BackupAndRestore` lets a training continue, if it does.

    Keras 3.15: `Trainer._initial_epoch`, which the callback sets at the begin of a training. No public way.
    """
    return model._initial_epoch


def set_training_mode(model: keras.Model, is_training: bool) -> None:
    """Sets the mode of a model on torch, where it is a `torch.nn.Module`, as Keras' own `fit` and `evaluate` do."""
    if keras.backend.backend() == "torch":
        model.train(is_training)


def flat_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns what `evaluate` gives without `return_dict`: a list in the order of the metrics, or one value.

    Keras 3.15: `Trainer._flatten_metrics_in_order`; the public `metrics_names` does not have the names in the logs.
    """
    return model._flatten_metrics_in_order(logs)


def update_loss_metric(model: keras.Model, loss: Any, num_rows: int) -> None:
    """Adds a batch to the mean that Keras reports as `loss`.

    Keras 3.15: `Trainer._loss_tracker`. It is the first of the public `model.metrics`, which walks through all layers
    each time: too slow for a training step.
    """
    model._loss_tracker.update_state(loss, sample_weight=num_rows)


def has_untold_loss(model: keras.Model) -> bool:
    """Returns whether the mean that Keras reports as `loss` has seen no batch: as 0.0, which none of them had.

    So it is where a user-defined step returns its loss, and updates no metric with it. Keras 3.15: as above.
    """
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None or all(metric is not tracker for metric in model.metrics):
        return False
    return not float(keras.ops.convert_to_numpy(tracker.count))


def metrics_of_ranks_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Returns the context in which Keras on torch asks no other rank: metrics are of the whole batch already.

    Keras 3.15 does not know of process groups. Keras 3.16 (keras-team/keras #23316) does wherever there is one: its
    trainer for torch, the first base of `keras.Model`, adds up all variables of metrics in `get_metrics_result`, in
    training and in evaluation, and wraps the model in DistributedDataParallel in `_initialize_ddp`, as when a callback
    predicts. Of the class: a model that overrides these finds them by
    `super()`. No public switch.
    """
    trainer = keras.Model.__mro__[1]
    values = {
        "get_metrics_result": lambda model: super(trainer, model).get_metrics_result(),
        "_initialize_ddp": lambda model: None,
    }
    is_torch = keras.backend.backend() == "torch"
    return replaced(trainer, **{name: value for name, value in values.items() if is_torch and name in vars(trainer)})


def symbols_of(data: Any, num_rows: int) -> Any:
    """Returns `KerasTensor`s of a structure of arrays, with the rows of the global batch: a process may hold some."""

    def symbol(leaf: Any) -> Any:
        if leaf is None:
            return None
        dtype = "string" if leaf.dtype.kind in "OSU" else str(leaf.dtype)
        return keras.KerasTensor((num_rows, *leaf.shape[1:]), dtype)

    return keras.tree.map_structure(symbol, data)


def output_symbols(model: keras.Model, data: tuple[Any, Any, Any]) -> Any:
    """Returns `KerasTensor`s of a model's outputs; None if its user-defined `call` takes no symbols.

    Raises what Keras raises for data of other shapes than the model and its losses take.

    Keras 3.15: `keras.src.backend.compute_output_spec`, with which its own trainer builds a model. The public
    `keras.Model.compute_output_spec` does not look at the losses.

    Args:
        model: built and compiled.
        data: `KerasTensor`s of inputs, targets and sample weights, with as many rows as a batch has.
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
    """Returns the losses of a compiled model: the name of the output if it has several, the loss, targets and output.

    Empty where Keras pairs targets and outputs in a way of its own.

    Keras 3.15: `CompileLoss._flat_losses`, of which are used `path`, `loss` and `name`; no public way.
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
    """Lets a callback that watches a metric decide now whether less is better, if it has not yet.

    Keras 3.15: `_set_monitor_op` of EarlyStopping and its like turns the sign of `min_delta` at the end of their first
    epoch: a second time, if the turned one was restored before. No public way.
    """
    if getattr(callback, "monitor_op", callback) is None:
        callback._set_monitor_op()


def losses_of_whole_batch(factor: float = 1.0) -> contextlib.AbstractContextManager[None]:
    """Keeps Keras' losses from being divided by the number of replicas of a `tf.distribute` strategy.

    Keras 3.15: `scale_loss_for_distribution` and `unscale_loss_for_distribution` divide those that take a mean, not
    those that take a sum or are user-defined, so that no later factor could be right for all. They are wrapped once,
    for good. No public way.

    `factor`: by which the losses of single outputs are multiplied for the means that Keras keeps of them.
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
    """Returns which of train_step, test_step and predict_step the model's class overrides."""
    return {name for name in STEPS if getattr(type(model), name) is not getattr(keras.Model, name)}


def portable_steps(model: keras.Model) -> set[str]:
    """Returns which of the user-defined steps take the data alone: on jax Keras' own take the state before it."""
    return {name for name in own_steps(model) if _takes_data_alone(getattr(type(model), name))}


@functools.cache
def _takes_data_alone(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return len(parameters) == 2 and all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)


def as_keras_gives(data: Any) -> Any:
    """Returns inputs, targets and sample weights as Keras hands them to a step: without those that are None.

    In float64, numbers are that, too; layers would convert them by themselves.
    """
    if keras.config.floatx() == "float64":
        data = keras.tree.map_structure(_as_float64, tuple(data))
    return keras.utils.pack_x_y_sample_weight(*data)


def _as_float64(leaf: Any) -> Any:
    if leaf is None or keras.backend.standardize_dtype(leaf.dtype) != "float32":
        return leaf
    return keras.ops.cast(leaf, "float64") if keras.ops.is_tensor(leaf) else leaf.astype("float64")


def has_call(model: keras.Model) -> bool:
    """Returns whether a model can be called: one that has a `train_step` of its own may do without."""
    return type(model).call is not keras.Model.call


class _LossesOfThread(threading.local):
    """A layer's list of losses, one for each thread: TensorFlow traces replicas in threads, in turns."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.extend, self.clear = self.own.extend, self.own.clear

    def __getitem__(self, place: Any) -> Any:
        return self.own[place]


def losses_by_thread(layers: Iterable[keras.layers.Layer]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which losses that layers add are kept by the thread that adds them.

    Keras 3.15: they are in `Layer._losses`, of which are used `extend`, `clear` and a slice. No public way.
    """
    return replaced_in_each((layer, {"_losses": _LossesOfThread()}) for layer in layers)


@contextlib.contextmanager
def hooked_steps(
    model: keras.Model,
    apply: Callable[..., Any],
    update_mean: Callable[..., Any],
    result: Callable[[Callable[[], Any]], Any],
) -> Iterator[None]:
    """Exchanges what a user-defined step calls, until it is left.

    Keras 3.15: user-defined steps call `Optimizer.apply` and metrics where they please; no hook of its own.

    Args:
        model: with the steps. `result` of its metrics is exchanged, and its layers' losses are kept by thread.
        apply: is called in the place of `apply` of all optimizers, with that and its arguments.
        update_mean: in the place of `keras.metrics.Mean.update_state`, likewise.
        result: in the place of `result` of metrics, likewise.
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
    """Gives a model its numbers, texts and truth values back that a step changes, past Keras, which would track them.

    For a trial of a user-defined step, which may count its calls in an attribute; those of the class count on. Keras
    3.15 copies no model together with its state.
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
    """Lets `float` and `int` read Keras variables of several replicas, and whatever reads a metric's bool.

    Keras 3.15: they ask TensorFlow's mirrored variable, which is no number. No hook: `Variable.__float__` and `__int__`
    are wrapped, once, for good. So is `Metric.add_variable`: what it makes is read as the sum over the replicas, and
    TensorFlow (2.21) adds up no bools.
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
    """Has `reduce` called instead of losses, as of those of a compiled model; those that it calls itself are as ever.

    Keras 3.15: `CompileLoss` pairs the losses with targets and outputs, and calls them. No hook: the public
    `Loss.__call__` is wrapped, once, for good.
    """
    wrap_for_good(keras.losses.Loss, "__call__", _reduced)
    try:
        with step_with(reduce=reduce):
            yield
    except ValueError as error:
        # Keras 3.16 raises another one in its place, with more words.
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
    """Returns the variables in which `compile` keeps the losses of single outputs, and those of its metrics.

    Keras 3.15: `CompileLoss.metrics`, `CompileMetrics.metrics` of `Trainer._compile_loss`, `_compile_metrics`; the
    public `model.metrics` walks through all layers, and does not tell which metrics are from where.
    """
    return _variables(model._compile_loss), _variables(model._compile_metrics)


def _variables(compiled: Any) -> list[keras.Variable]:
    metrics = [] if compiled is None else compiled.metrics
    return [variable for metric in metrics for variable in metric.variables]


def update_compiled_metrics(model: keras.Model, targets: Any, outputs: Any, sample_weight: Any) -> None:
    """Updates the metrics of `compile`.

    Keras 3.15: `Trainer._compile_metrics`. The public `compute_metrics` also computes all results.
    """
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(targets, outputs, sample_weight)


def metric_function(metric: keras.metrics.Metric) -> tuple[Callable[..., Any] | None, dict[str, Any]]:
    """Returns the function whose mean a metric is, and its arguments; None if it is no such mean.

    Keras 3.15: `MeanMetricWrapper._fn` and `_fn_kwargs`; the public `get_config` has serialized ones.
    """
    return getattr(metric, "_fn", None), getattr(metric, "_fn_kwargs", {})


def is_metric_of_keras(function: Callable[..., Any]) -> bool:
    """Returns whether a function is one of those that Keras' metrics take the mean of, of each row alone.

    Keras 3.15: those of `keras.src.metrics`, as `sparse_categorical_accuracy`; the public module has classes alone.
    """
    return function.__module__.startswith("keras.src.metrics.")


def of_same_rank(values: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Returns values of a loss and weights, with one axis more or less where Keras does so.

    Keras 3.15: `squeeze_or_expand_to_same_rank` of its losses, with which `reduce_weighted_values` begins. Not public.
    """
    return loss_module.squeeze_or_expand_to_same_rank(values, sample_weight)
