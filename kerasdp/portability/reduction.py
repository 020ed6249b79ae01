"""Says which losses and metrics of a batch are sums over its rows: each replica may compute them of its own rows.

Those of Keras are known, and others are declared with `per_sample`. All else is computed of the whole batch.
"""

import contextlib
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import keras
import numpy as np
from keras import ops

from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import is_of_keras, living_variables
from kerasdp.keras_compat.models import (
    compiled_loss,
    compiled_metrics,
    compiled_variables,
    is_metric_of_keras,
    loss_options,
    metric_function,
    output_losses,
)

# Keras' functions (3.15) that give a loss for each row, and nothing about rows taken together (as `dice`).
BY_ROWS = {
    getattr(keras.losses, name)
    for name in (
        "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy",
        "categorical_focal_crossentropy", "categorical_hinge", "cosine_similarity", "ctc", "hinge", "huber",
        "kl_divergence", "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
        "mean_squared_logarithmic_error", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
    )
}  # fmt: skip


Definition = TypeVar("Definition")
_DECLARED = "is_per_sample"


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


def _is_declared(*definitions: Any) -> bool:
    """Returns whether one of these was given to `per_sample`."""
    return any(getattr(definition, _DECLARED, False) for definition in definitions)


def is_by_rows(loss: keras.losses.Loss) -> bool:
    """Returns whether a loss is known to give a value, or values, for each row, which depend on that row alone."""
    function = getattr(loss, "fn", None)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        return False
    if _is_declared(function, type(loss)):
        return True
    return is_of_keras(type(loss)) and function in BY_ROWS and loss_options(loss).get("axis", -1) == -1


def is_loss_of_keras(loss: keras.losses.Loss) -> bool:
    """Returns whether class and function of a loss are Keras' own."""
    return is_of_keras(type(loss)) and is_of_keras(getattr(loss, "fn", type(loss)))


def is_sum_over_rows(model: keras.Model) -> bool:
    """Returns whether the loss of a batch is a sum over its rows, but for what it is divided by.

    `model`: compiled, and its losses built.
    """
    return type(model).compute_loss is keras.Model.compute_loss and not _coupling_losses(model)


def _coupling_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """Returns the losses of a model that need the whole batch."""
    return [loss for loss in output_losses(model) if not is_by_rows(loss) or loss.reduction in (None, "none")]


def require_values(loss: keras.losses.Loss, values: Any, num_rows: int) -> None:
    """Raises `UserError` if a loss that was said to be `per_sample` gives no value for each row."""
    if not len(values.shape) or values.shape[0] != num_rows:
        raise UserError(
            f"the loss {loss.name}: expected a value for each of the {num_rows} samples, since it is declared "
            f"per_sample. Received: shape {tuple(values.shape)}"
        )


def shares_of(model: keras.Model, counts: list[int], *, is_weighted: bool, instead: str) -> list[float]:
    """Returns the weight of each micro-batch's loss in the loss of the global batch.

    Args:
        model: compiled, and its losses built.
        counts: rows of each micro-batch.
        is_weighted: whether the samples have weights.
        instead: what to do about a loss that cannot be computed for each of them alone.

    Raises:
        UserError: if the loss of the global batch is not a sum over the micro-batches.
    """
    # Those that Keras has made of all that `compile` takes, in each of its outputs.
    losses = output_losses(model)
    for loss in losses:
        # One with `ignore_class` takes the mean of what is left (Keras 3.15).
        if not is_by_rows(loss) or loss_options(loss).get("ignore_class") is not None:
            raise UserError(
                f"the loss {loss.name} of {model.name} needs the whole batch at once; {instead}, or, where it "
                "returns a value for each sample, which depends on that sample alone, declare it with "
                "kerasdp.per_sample"
            )
    reductions = {loss.reduction for loss in losses}
    if reductions == {"sum"}:
        return [1.0] * len(counts)
    means = {"sum_over_batch_size", "mean"} | (set() if is_weighted else {"mean_with_sample_weight"})
    if not reductions <= means:
        raise UserError(
            f"the losses of {model.name} are reduced by {', '.join(map(str, sorted(map(str, reductions))))}, which "
            f"needs the whole batch at once; {instead}"
        )
    return [count / sum(counts) for count in counts]


NUM_ROWS = 12


def state_of_losses(model: keras.Model, targets: Any, symbols: Any) -> list[keras.Variable]:
    """Returns the variables to which user-defined losses of `compile` assign; they are no model's.

    Args:
        model: its losses built.
        targets: `NUM_ROWS` rows, NumPy arrays.
        symbols: the model's outputs, as it gives them: `KerasTensor`s, whose rows do not matter.
    """
    numbers = np.random.RandomState(0)

    def random(tensor: Any) -> Any:
        """Returns outputs between 0 and 1, which suits probabilities and all else."""
        values = numbers.uniform(0.05, 0.95, (NUM_ROWS, *tensor.shape[1:]))
        return ops.convert_to_tensor(values.astype("float32"), dtype=tensor.dtype)

    def assigned() -> set[int]:
        with contextlib.suppress(Exception), keras.StatelessScope() as scope:  # on outputs that they may not expect
            cast(Any, compiled_loss(model))(targets, keras.tree.map_structure(random, symbols))
            return set(scope.state_mapping)
        return set()

    with ThreadPoolExecutor(1) as thread:  # where no graph is being traced, and no scope is entered
        found = thread.submit(assigned).result() - set(map(id, compiled_variables(model)[0]))
    variables = [variable for variable in living_variables() if id(variable) in found] if found else []
    return [variable for variable in variables if variable.name != "seed_generator_state"]  # they draw portably


def adds_up(metric: keras.metrics.Metric) -> bool:
    """Returns whether updates with some rows of a batch, and with the others, change the variables as one with all."""
    function, options = metric_function(metric)
    if _is_declared(function, type(metric)):  # TensorFlow adds no truths up, and one of all rows is no sum
        return not any(variable.dtype == "bool" for variable in metric.variables)
    if is_of_keras(type(metric)) and function is None:
        return bool(metric.variables)
    is_known = function in BY_ROWS or (inspect.isfunction(function) and is_metric_of_keras(function))
    return is_of_keras(type(metric)) and is_known and options.get("axis", -1) == -1


def are_sums_over_rows(model: keras.Model) -> bool:
    """Returns whether the metrics of a compiled model, once they are built, add up over the rows of a batch."""
    return type(model).compute_metrics is keras.Model.compute_metrics and not _coupling_metrics(model)


def _coupling_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics of a compiled model that are not known to add up."""
    return [metric for _, metric in compiled_metrics(model) if not adds_up(metric)]


def reasons_to_gather(model: keras.Model) -> list[str]:
    """Returns what of a compiled model needs the outputs of the whole batch, with the reason; nothing, it may be."""
    reasons = [f"the loss {loss.name} (not known to count each sample by itself)" for loss in _coupling_losses(model)]
    for name in ("compute_loss", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            reasons = [*(reasons if name == "compute_metrics" else ()), f"{name} of {type(model).__name__}"]
    return reasons + [f"the metric {metric.name} (not known to add up)" for metric in _coupling_metrics(model)]
