"""PyTorch: computes loss and metrics of the global batch from each rank's forward pass on its shard."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.steps import inputs_for
from kerasdp.portability.replica_context import ReplicaContext

# Of a rank's outputs that are sent together with the gradients.
_MOST_BYTES = 2**20


class GlobalBatch:
    """Computes loss and metrics of the global batch for the steps of one model."""

    def __init__(self, strategy: Any, model: Any):
        """Made once for each compiled model."""
        from kerasdp.portability.activity_regularization import WholeBatchPenalties

        self.strategy, self.model = strategy, model
        self.penalties = WholeBatchPenalties(model)

    def forward(self, module: Any, inputs: Any, context: ReplicaContext | None, training: bool) -> Any:
        """Computes the outputs of this rank's rows. `module`: the model, maybe in DistributedDataParallel."""
        arguments = {"training": training} if "training" in self.model.call_signature_parameters else {}
        if context is None:
            return module(inputs, **arguments)
        with self.penalties.active(context.adding()):
            return module(inputs, **arguments)

    def outputs(self, module: Any, inputs: Any, context: ReplicaContext | None, training: bool) -> Any:
        """Computes the outputs of the global batch; arguments as in `forward`."""
        outputs = self.forward(module, inputs, context, training)
        return outputs if context is None else context.whole_outputs(outputs)

    def training_loss(
        self, batch: DeviceBatch, outputs: Any, context: ReplicaContext | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Callable[[Any], tuple[Any, torch.Tensor]]]:
        """Returns a loss whose gradients, averaged over the ranks, are those of the global batch's loss.

        Returns:
            That loss; what is to be summed over the ranks, a flat tensor, or None; and a function that takes the
            sums, moves the moving statistics, and returns the outputs and the loss of the global batch.
        """
        from kerasdp.portability.layers.batch_normalization import move_together, pack_moving
        from kerasdp.portability.loss_reduction import is_mean_over_shards

        num_rows = len(batch.indices)
        if context is None:
            loss = self._loss(batch, outputs, training=True)
            return loss, None, lambda _: (_detached(outputs), loss.detach())
        num_own = context.rows or 0  # None on jax alone
        is_even = num_own * context.num_replicas == num_rows
        is_shard_loss = (
            is_even
            and is_mean_over_shards(self.model, outputs)
            and outputs.nbytes < _MOST_BYTES
            and context.is_by_rows(outputs)
        )
        if is_shard_loss:
            own = slice(context.first_row, context.first_row + num_own)
            loss = self._loss(batch, outputs, training=True, rows=own)
            # Rows of others are zero, and so the sum over the ranks is all rows.
            others = [0, 0] * (outputs.dim() - 1) + [context.first_row, num_rows - context.first_row - num_own]
            rows = torch.nn.functional.pad(outputs.detach(), others)
            shared = [loss.detach() / context.num_replicas, rows]
        else:
            outputs = context.whole_outputs(outputs)
            loss = self._loss(batch, outputs, training=True)
            shared = []
        if context.moving:
            shared.append(pack_moving(context.moving))
        if not shared:
            return loss, None, lambda _: (_detached(outputs), loss.detach())
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in shared))

        def finish(sums: torch.Tensor) -> tuple[Any, torch.Tensor]:
            summed = sums.split([tensor.numel() for tensor in shared])
            if context.moving:
                move_together(context.moving, summed[-1])
            if not is_shard_loss:
                return _detached(outputs), loss.detach()
            whole = summed[1].reshape(num_rows, *outputs.shape[1:]).to(outputs.dtype)
            return whole, summed[0].reshape(()).to(loss.dtype)

        return loss, torch.cat([tensor.reshape(-1).to(dtype) for tensor in shared]), finish

    def loss(self, batch: DeviceBatch, outputs: Any, *, training: bool) -> torch.Tensor:
        """Returns the loss of the global batch; `outputs` are those of all of it."""
        return self._loss(batch, outputs, training=training)

    def metrics(self, batch: DeviceBatch, outputs: Any, loss: torch.Tensor) -> dict[str, Any]:
        """Updates the metrics with the global batch, and returns their values."""
        from kerasdp.keras_compat import update_loss_metric

        inputs, targets, sample_weight, indices = batch
        update_loss_metric(self.model, loss, len(indices))
        inputs = inputs_for("compute_metrics", self.model, inputs, lambda own: self.strategy.gather(own, len(indices)))
        return self.model.compute_metrics(inputs, targets, outputs, sample_weight=sample_weight)

    def _loss(self, batch: DeviceBatch, outputs: Any, training: bool, rows: slice = slice(None)) -> torch.Tensor:
        import keras

        from kerasdp.keras_compat import compute_loss

        inputs, targets, sample_weight, indices = batch
        inputs = inputs_for("compute_loss", self.model, inputs, lambda own: self.strategy.gather(own, len(indices)))
        # A copy: Keras (3.15) multiplies sample weights by the outputs' mask in place.
        targets, sample_weight = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[rows].clone(), (targets, sample_weight)
        )
        return compute_loss(self.model, inputs, targets, outputs, sample_weight, training=training)


def _detached(outputs: Any) -> Any:
    import keras

    from kerasdp.keras_compat import with_mask

    return keras.tree.map_structure(lambda leaf: with_mask(torch.Tensor.detach, leaf), outputs)


class TrainedModel(torch.nn.Module):
    """Calls a model, and has the weights that are trained as parameters: each once, and no others.

    A Keras (3.15) model as a module knows its weights by their paths, of which two may be equal, and those that it had
    when it was built, so that DistributedDataParallel would leave some alone and wait for others.
    """

    def __init__(self, model: Any, weights: list[Any]):
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)
        self._call = model.__call__  # not the model itself, whose parameters would be this module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the model's outputs."""
        return self._call(*args, **kwargs)
