"""Finds step methods of a user's model, and lets a run take part in what they do with optimizers and metrics.

Loss and metrics of `compile` can be computed of some rows of a batch.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.losses import loss as loss_module

from kerasdp.errors import RunError
from kerasdp.keras_compat.layers import all_layers
from kerasdp.keras_compat.optimizers import wrapped_apply
from kerasdp.keras_compat.patches import current_step, replaced_in_each, step_with, wrapped

STEPS = ("train_step", "test_step", "predict_step")


def own_steps(model: keras.Model) -> set[str]:
    """Returns which of train_step, test_step and predict_step the model's class overrides."""
    return {name for name in STEPS if getattr(type(model), name) is not getattr(keras.Model, name)}


def as_keras_gives(data: Any) -> Any:
    """Returns inputs, targets and sample weights as Keras hands them to a step: without those that are None."""
    return keras.utils.pack_x_y_sample_weight(*data)


def has_call(model: keras.Model) -> bool:
    """Returns whether a model can be called: one that has a `train_step` of its own may do without."""
    return type(model).call is not keras.Model.call


class _LossesOfThread(list[Any]):
    """A layer's list of losses, one for each thread: TensorFlow traces replicas in threads, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread: dict[int, list[Any]] = {}

    def extend(self, losses: Iterable[Any]) -> None:
        self._own().extend(losses)

    def clear(self) -> None:
        self._own().clear()

    def __getitem__(self, place: Any) -> Any:
        return self._own()[place]

    def _own(self) -> list[Any]:
        return self._of_thread.setdefault(threading.get_ident(), [])


def losses_by_thread(layers: Iterable[keras.layers.Layer]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which losses that layers add are kept by the thread that adds them.

    Keras 3.15: they are in `Layer._losses`, of which are used `extend`, `clear` and a slice. No public way.
    """
    return replaced_in_each((layer, {"_losses": _LossesOfThread()}) for layer in layers)


@contextlib.contextmanager
def hooked_steps(
    model: keras.Model,
    apply: Callable[[Callable[..., Any]], Callable[..., Any]],
    update_mean: Callable[[Callable[..., Any]], Callable[..., Any]],
    result: Callable[[keras.metrics.Metric, Callable[[], Any]], Callable[[], Any]],
) -> Iterator[None]:
    """Exchanges what a user-defined step calls, until it is left.

    Keras 3.15: user-defined steps call `Optimizer.apply` and metrics where they please; no hook of its own.

    Args:
        model: with the steps. `result` of its metrics is exchanged, and its layers' losses are kept by thread.
        apply: gets `apply` of all optimizers, and gives the method in its place.
        update_mean: gets `keras.metrics.Mean.update_state`, and gives the method in its place.
        result: gets a metric and its `result`, and gives the function in its place.
    """
    with (
        wrapped_apply(apply),
        wrapped(keras.metrics.Mean, update_state=update_mean),
        losses_by_thread(all_layers(model)),
        replaced_in_each((metric, {"result": result(metric, metric.result)}) for metric in model.metrics),
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


# Reduces a loss: called with the loss, targets, outputs and sample weights.
Reduce = Callable[[keras.losses.Loss, Any, Any, Any], Any]


class HookedLoss:
    """Stands in the place of one loss of a compiled model, and asks the current step how to reduce it."""

    def __init__(self, loss: keras.losses.Loss):
        self.loss = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Computes the loss, or has it reduced."""
        reduce = current_step().reduce
        if reduce is None:
            return self.loss(y_true, y_pred, sample_weight)
        return reduce(self.loss, y_true, y_pred, sample_weight)


@contextlib.contextmanager
def reducing_losses(model: keras.Model, reduce: Reduce) -> Iterator[None]:
    """Has `reduce` called instead of the losses of a compiled model, one for each output that has one.

    Keras 3.15: the entries of `CompileLoss._flat_losses`, which pairs them with targets and outputs. They are replaced
    once, for good. No public way.
    """
    compiled: Any = model._compile_loss
    if compiled is not None:  # each loss once, whichever threads come here together
        compiled._flat_losses = [
            each if isinstance(each.loss, HookedLoss) else each._replace(loss=HookedLoss(each.loss))
            for each in compiled._flat_losses
        ]
    try:
        with step_with(reduce=reduce):
            yield
    except ValueError as error:
        # Keras 3.16 raises another one in its place, with more words.
        if isinstance(error.__cause__, RunError):
            raise error.__cause__ from None
        raise


def wrapped_losses(
    losses: Iterable[keras.losses.Loss], wrap: Callable[[keras.losses.Loss], Callable[[Any, Any], Any]]
) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which functions make the public `call` of some losses.

    Keras 3.15: what a loss gets is converted to its type, and taken out of dictionaries, just before that. No hook.

    Args:
        losses: each once.
        wrap: gets a loss, and gives the function of targets and outputs.
    """
    return replaced_in_each((loss, {"call": wrap(loss)}) for loss in losses)


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
