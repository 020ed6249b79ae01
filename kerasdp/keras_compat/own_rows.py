"""Lets the loss and the metrics of `compile` be computed of some rows of a batch."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.losses import loss as loss_module

from kerasdp.errors import RunError
from kerasdp.keras_compat.patches import replaced_in_each

# Of a loss, targets, outputs and sample weights.
Reduce = Callable[[keras.losses.Loss, Any, Any, Any], Any]

_reduce: contextvars.ContextVar[Reduce | None] = contextvars.ContextVar("kerasdp_reduce", default=None)


class HookedLoss:
    """Stands in the place of one loss of a compiled model, and asks the context how to reduce it."""

    def __init__(self, loss: keras.losses.Loss):
        self.loss = loss

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Computes the loss, or has it reduced."""
        reduce = _reduce.get()
        return (
            self.loss(y_true, y_pred, sample_weight)
            if reduce is None
            else reduce(self.loss, y_true, y_pred, sample_weight)
        )


@contextlib.contextmanager
def reducing_losses(model: keras.Model, reduce: Reduce) -> Iterator[None]:
    """Has `reduce` called instead of the losses of a compiled model, one for each output that has one.

    Keras 3.15: the entries of `CompileLoss._flat_losses`, which pairs them with targets and outputs. They are replaced
    once, for good, by what asks a context variable, since TensorFlow traces replicas in threads, in turns. No public
    way.
    """
    compiled: Any = model._compile_loss
    if compiled is not None:  # each loss once, whichever threads come here together
        compiled._flat_losses = [
            each if isinstance(each.loss, HookedLoss) else each._replace(loss=HookedLoss(each.loss))
            for each in compiled._flat_losses
        ]
    token = _reduce.set(reduce)
    try:
        yield
    except ValueError as error:
        # Keras 3.16 raises another one in its place, with more words.
        if isinstance(error.__cause__, RunError):
            raise error.__cause__ from None
        raise
    finally:
        _reduce.reset(token)


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
