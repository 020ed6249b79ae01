"""Tells which losses of a batch are sums over its rows, so that each replica may compute them of its own rows."""

import enum
import weakref
from typing import Any, TypeVar

import keras

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import is_of_keras
from kerasdp.keras_compat.models import loss_options, output_losses


class Reduction(enum.Enum):
    """How a loss (`keras.losses.Loss`) comes from the rows of a batch, before Keras' `reduction` of what it gives."""

    BY_ROWS = "a value, or values, for each row, which depend on that row alone"
    MEAN = "one number, which is the mean of the numbers of single rows"
    COUPLES = "depends on rows taken together"
    UNKNOWN = "a loss that could not be tried with random outputs"


# Of Keras' functions (3.15), those that give a loss for each row, and nothing about rows taken together (as `dice`).
BY_ROWS = {
    getattr(keras.losses, name)
    for name in (
        "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy",
        "categorical_focal_crossentropy", "categorical_hinge", "cosine_similarity", "hinge", "huber", "kl_divergence",
        "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
        "mean_squared_logarithmic_error", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
    )
}  # fmt: skip


Definition = TypeVar("Definition")
_DECLARED = "is_per_sample"

# What `kerasdp.portability.loss_probe` found out about others, by the loss.
found: "weakref.WeakKeyDictionary[keras.losses.Loss, Reduction]" = weakref.WeakKeyDictionary()


def per_sample(definition: Definition) -> Definition:
    """Says of a loss or a metric that a sample's part of it depends on that sample alone; a decorator.

    Then several devices compute it each of their own samples, instead of gathering the outputs of the whole batch.

    Args:
        definition: a loss function that returns a value (or values) for each sample, shape `(samples, ...)`; a subclass
            of `keras.losses.Loss` whose `call` does; or a subclass of `keras.metrics.Metric` whose variables are sums
            over the samples.

    Returns:
        The same.
    """
    setattr(definition, _DECLARED, True)
    return definition


def is_declared(*definitions: Any) -> bool:
    """Returns whether one of these was given to `per_sample`."""
    return any(getattr(definition, _DECLARED, False) for definition in definitions)


def reduction_of(loss: keras.losses.Loss) -> Reduction:
    """Returns how a loss comes from the rows of a batch: the one place that knows."""
    function, options = getattr(loss, "fn", None), loss_options(loss)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return Reduction.UNKNOWN
    if is_declared(function, type(loss)):
        return Reduction.BY_ROWS
    if is_of_keras(type(loss)):
        # They divide by what they find in the batch, whatever their `reduction` says (Keras 3.15).
        coupled = function in (keras.losses.dice, keras.losses.tversky) and options.get("axis") is None
        if coupled or function is keras.losses.circle:
            return Reduction.COUPLES
        if function in BY_ROWS and options.get("axis", -1) == -1:
            return Reduction.BY_ROWS
    return found.get(loss, Reduction.UNKNOWN)


def divides_by_what_is_left(loss: keras.losses.Loss) -> bool:
    """Returns whether a loss masks some of its values, and takes the mean of the others (Keras 3.15)."""
    return loss_options(loss).get("ignore_class") is not None


def is_sum_over_rows(model: keras.Model, *, is_weighted: bool) -> bool:
    """Returns whether the loss of a batch is a sum over its rows, but for what it is divided by.

    Args:
        model: compiled, and its losses built.
        is_weighted: whether the samples have weights.
    """
    return type(model).compute_loss is keras.Model.compute_loss and not coupling_losses(model, is_weighted=is_weighted)


def coupling_losses(model: keras.Model, *, is_weighted: bool) -> list[tuple[keras.losses.Loss, Reduction]]:
    """Returns the losses of a model that need the whole batch, with the reason; arguments: as `is_sum_over_rows`."""
    found = []
    for loss in output_losses(model):
        reduction = reduction_of(loss)
        is_sum = (
            loss.reduction not in (None, "none")
            if reduction is Reduction.BY_ROWS
            # Weighted, its mean is multiplied by that of the weights.
            else (reduction is Reduction.MEAN and not is_weighted and loss.reduction not in (None, "none", "sum"))
        )
        if not is_sum:
            found.append((loss, reduction))
    return found


def require_values(loss: keras.losses.Loss, values: Any, num_rows: int) -> None:
    """Raises `UserError` if a loss that was said to be `per_sample` gives no value for each row."""
    if reduction_of(loss) is Reduction.BY_ROWS and (not len(values.shape) or values.shape[0] != num_rows):
        raise UserError(
            f"the loss {loss.name}: expected a value for each of the {num_rows} samples, since it is declared "
            f"per_sample. Received: shape {tuple(values.shape)}"
        )
