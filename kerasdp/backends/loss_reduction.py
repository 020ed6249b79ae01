"""Tells which losses of a global batch are the mean of the losses of its equal shards."""

from typing import Any

import keras

from kerasdp.keras_compat import has_mask, is_of_keras, loss_options, output_losses

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
    options = loss_options(loss)
    return (
        is_of_keras(type(loss))
        and getattr(loss, "fn", None) in _BY_ROWS
        and loss.reduction in ("sum_over_batch_size", "mean")
        and options.get("ignore_class") is None
        and options.get("axis", -1) in (-1, len(outputs.shape) - 1)
    )
