"""Lets activity regularizers see the global batch on several replicas, as on one device."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from kerasdp.errors import UserError
from kerasdp.keras_compat import added_losses, all_layers
from kerasdp.portability import replica_context


class WholeBatchPenalties:
    """Activity regularizers that see the global batch, as on one device, not one replica's padded rows.

    What they give goes into `ReplicaContext.penalties`, not into Keras' list of losses: that list belongs to the
    layer, which with TensorFlow all replicas share while they are traced in turns.
    """

    def __init__(self, model: keras.Model):
        self.layers = all_layers(model)
        self.regularized = [layer for layer in self.layers if layer.activity_regularizer is not None]
        self.is_checked = False
        self.num_calls: dict[int, int] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Returns the context of a forward pass on several replicas.

        Raises:
            UserError: if a layer adds a loss of its own, in which a replica's shard cannot be told from the whole.
        """
        kept = [layer.activity_regularizer for layer in self.regularized]
        self.num_calls.clear()
        for layer, regularizer in zip(self.regularized, kept):
            layer.activity_regularizer = functools.partial(self._penalize, layer, regularizer)
        try:
            yield
        finally:
            for layer, regularizer in zip(self.regularized, kept):
                layer.activity_regularizer = regularizer
        self.refuse_added()

    def refuse_added(self) -> None:
        """Raises `UserError` if a layer has added a loss of its own, in which a shard cannot be told from the whole."""
        if self.is_checked:
            return
        for layer in self.layers:
            # Keras adds what a regularizer gives, too.
            if len(added_losses(layer)) > self.num_calls.get(id(layer), 0):
                raise UserError(
                    f"layer {layer.name} calls add_loss, with which it would count only one device's shard of the "
                    "batch; move that loss into the model's compute_loss, or train on one device or with --backend=jax"
                )
        self.is_checked = True

    def _penalize(self, layer: keras.layers.Layer, regularizer: Any, output: Any) -> Any:
        self.num_calls[id(layer)] = self.num_calls.get(id(layer), 0) + 1
        context = replica_context.current()
        if context is None or context.rows is None:
            return regularizer(output)
        axis = context.row_axis(("penalty", id(layer)), output, f"the activity regularizer of layer {layer.name}")
        whole = context.whole(output, axis)
        context.penalties.append(regularizer(whole) / whole.shape[0])  # by the samples, as Keras does
        return keras.ops.zeros(())
