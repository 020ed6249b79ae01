"""Makes a Keras model train the same on every backend and device count."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from kerasdp import replica_context
from kerasdp.errors import UserError
from kerasdp.layers import BatchNormalization


def portable(model: keras.Model, batch_norm: str = "sync") -> keras.Model:
    """Gives each batch norm of a model the same meaning everywhere.

    The layers are changed in place, so it works for any model: functional, Sequential, nested, subclassed.

    Args:
        model: any Keras model.
        batch_norm: `"sync"`: statistics over the global batch; `"replica"`: over each replica's part.

    Returns:
        The same model.
    """
    for layer in model._flatten_layers():
        # Only Keras' own class: a subclass of somebody's may do anything in its `call`.
        if type(layer) in (keras.layers.BatchNormalization, BatchNormalization):
            layer.__class__ = BatchNormalization
            layer.statistics = batch_norm
    return model


@contextlib.contextmanager
def whole_batch_penalties(model: keras.Model) -> Iterator[None]:
    """Within it, activity regularizers see the global batch, as on one device, not one replica's padded rows.

    What they give goes into `ReplicaContext.penalties`, not into Keras' list of losses: that list belongs to the
    layer, which with TensorFlow all replicas share while they are traced in turns.

    Raises:
        UserError: if a layer adds a loss of its own, in which a replica's part cannot be told from the whole.
    """
    regularized = [layer for layer in model._flatten_layers() if layer.activity_regularizer is not None]
    kept = [layer.activity_regularizer for layer in regularized]
    for layer, regularizer in zip(regularized, kept):
        layer.activity_regularizer = lambda output, regularizer=regularizer: _penalize(regularizer, output)
    try:
        yield
    finally:
        for layer, regularizer in zip(regularized, kept):
            layer.activity_regularizer = regularizer
    for layer in model._flatten_layers():
        if layer._get_own_losses() and layer not in regularized:
            raise UserError(
                f"layer {layer.name} calls add_loss, with which it would count only one device's part of the batch; "
                "move that loss into the model's compute_loss, or train on one device or with --backend=jax"
            )


def _penalize(regularizer: Any, output: Any) -> Any:
    context = replica_context.current()
    if context is None:
        return regularizer(output)
    whole = context.gather_rows(output)
    context.penalties.append(regularizer(whole) / whole.shape[0])  # by the samples, as Keras does
    return keras.ops.zeros(())
