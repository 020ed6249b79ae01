"""Lets activity regularizers see the global batch on several replicas, as on one device."""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from kerasdp.keras_compat.layers import all_layers, hook_add_loss, wrapped_regularizers
from kerasdp.portability import replica_context
from kerasdp.portability.added_losses import AddedLosses, take_added_loss, watched_calls
from kerasdp.portability.row_axes import Adding


class WholeBatchPenalties:
    """Activity regularizers that see the global batch, as on one device, not one replica's padded rows.

    What they give goes into `ReplicaContext.penalties`, not into Keras' list of losses: that list belongs to the
    layer, which with TensorFlow all replicas share while they are traced in turns.
    """

    def __init__(self, model: keras.Model):
        self.regularized = [layer for layer in all_layers(model) if layer.activity_regularizer is not None]
        hook_add_loss(take_added_loss)

    @contextlib.contextmanager
    def active(self, adding: Iterable[Adding] = ()) -> Iterator[None]:
        """Returns the context of a forward pass on several replicas. `adding`: the layers that add losses."""
        penalizing = functools.partial(functools.partial, self._penalize)
        with wrapped_regularizers(self.regularized, penalizing), watched_calls([each.layer for each in adding]):
            yield

    def _penalize(self, layer: keras.layers.Layer, regularizer: Any, output: Any) -> Any:
        context = replica_context.current()
        if context is None or context.rows is None:
            return regularizer(output)
        axis = context.row_axis(("penalty", id(layer)), output, f"the activity regularizer of layer {layer.name}")
        whole = context.whole(output, axis)
        penalty = regularizer(whole) / whole.shape[0]  # by the samples, as Keras does
        context.regularized.append(id(layer))
        if isinstance(context.adds, AddedLosses):
            return penalty * output.shape[0]  # by which Keras divides it
        context.penalties.append(penalty)
        return keras.ops.zeros(())
