"""Tells which losses of a batch are made of one value for each row, so that they may be computed shard by shard."""

import enum
import weakref
from typing import Any

import keras

from kerasdp.keras_compat import has_mask, is_of_keras, loss_options, output_losses


class Reduction(enum.Enum):
    """How a loss (`keras.losses.Loss`) comes from the rows of a batch, before Keras' `reduction` of what it gives."""

    BY_ROWS = "a value, or values, for each row, which depend on that row alone"
    MEAN = "one number, which is the mean of the numbers of single rows"
    COUPLES = "depends on rows taken together"
    UNKNOWN = "a loss that could not be tried with random outputs"


# Of Keras' functions (3.15), those that give a loss for each row, and nothing about rows taken together (as `dice`).
_BY_ROWS = {
    getattr(keras.losses, name)
    for name in (
        "binary_crossentropy", "binary_focal_crossentropy", "categorical_crossentropy",
        "categorical_focal_crossentropy", "categorical_hinge", "cosine_similarity", "hinge", "huber", "kl_divergence",
        "log_cosh", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
        "mean_squared_logarithmic_error", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
    )
}  # fmt: skip


# What `kerasdp.portability.loss_probe` found out about others, by the loss.
found: "weakref.WeakKeyDictionary[keras.losses.Loss, Reduction]" = weakref.WeakKeyDictionary()


def reduction_of(loss: keras.losses.Loss) -> Reduction:
    """Returns how a loss comes from the rows of a batch: the one place that knows."""
    function, options = getattr(loss, "fn", None), loss_options(loss)
    if is_of_keras(type(loss)):
        # They divide by what they find in the batch, whatever their `reduction` says (Keras 3.15).
        coupled = function in (keras.losses.dice, keras.losses.tversky) and options.get("axis") is None
        if coupled or function is keras.losses.circle or options.get("ignore_class") is not None:
            return Reduction.COUPLES
        if function in _BY_ROWS and options.get("axis", -1) == -1:
            return Reduction.BY_ROWS
    return found.get(loss, Reduction.UNKNOWN)


def is_mean_over_shards(model: keras.Model, outputs: Any) -> bool:
    """Returns whether each replica may take the loss of its own rows, if all have equally many.

    Then nobody waits for the others' outputs between the forward and the backward pass. True for a single output with
    a built-in loss; else the loss is taken of the gathered outputs, which is right for any.

    Args:
        model: a compiled model.
        outputs: of a shard of the batch.
    """
    if type(model).compute_loss is not keras.Model.compute_loss or keras.tree.is_nested(outputs):
        return False
    # A mask's weights depend on how many rows are masked, and without a second axis the rows are what is averaged.
    if has_mask(outputs) or len(outputs.shape) < 2:
        return False
    losses = output_losses(model)
    if len(losses) != 1:
        return False
    loss = losses[0]
    return reduction_of(loss) is Reduction.BY_ROWS and loss.reduction in ("sum_over_batch_size", "mean")
