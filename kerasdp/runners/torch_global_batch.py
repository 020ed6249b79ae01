"""Loss and metrics of a global batch, from the forward pass of each rank on its rows of it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # its operations, too

from kerasdp.replica_context import ReplicaContext
from kerasdp.runners import PlacedBatch

_collectives = torch.ops._c10d_functional


class GlobalBatch:
    """What the steps of a model compute beside its layers."""

    def __init__(self, replicas: Any, model: Any):
        """`replicas` of `torch_ddp`."""
        from kerasdp.portability import WholeBatchPenalties

        self.replicas, self.model = replicas, model
        self.penalties = WholeBatchPenalties(model)

    def forward(self, module: Any, inputs: Any, context: ReplicaContext | None, training: bool) -> Any:
        """The outputs of this rank's rows. `module`: the model itself, or the model in DistributedDataParallel."""
        arguments = {"training": training} if self.model._call_has_training_arg else {}
        if context is None:
            return module(inputs, **arguments)
        with self.penalties.active():
            return module(inputs, **arguments)

    def training_loss(
        self, batch: PlacedBatch, outputs: Any, context: ReplicaContext | None
    ) -> tuple[torch.Tensor, Callable[[], tuple[Any, torch.Tensor]]]:
        """A loss whose gradients, averaged over the ranks, are those of the global batch's loss.

        With what remains to be done behind the backward pass, during which it is on its way: a function that moves the
        moving statistics, and returns the outputs and the loss of the global batch.
        """
        from kerasdp.layers.batch_normalization import move_together, pack_moving
        from kerasdp.loss_of_parts import is_mean_of_parts

        num_rows = len(batch.indices)
        if context is None:
            loss = self._loss(batch, outputs, training=True)
            return loss, lambda: (_detached(outputs), loss.detach())
        is_even = context.rows * self.replicas.num_replicas == num_rows
        if not (is_even and is_mean_of_parts(self.model, outputs)):
            whole = self.replicas.gather(outputs, num_rows)
            loss = sum(context.penalties, self._loss(batch, whole, training=True))
            moved = _sent_sum(pack_moving(context.moving)) if context.moving else None

            def finish() -> tuple[Any, torch.Tensor]:
                if moved is not None:
                    move_together(context.moving, _received(moved))
                return _detached(whole), loss.detach()

            return loss, finish
        own = slice(context.first_row, context.first_row + context.rows)
        loss = sum(context.penalties, self._loss(batch, outputs, training=True, rows=own))
        share = loss.detach().reshape(1) / self.replicas.num_replicas
        with torch.no_grad():
            moved = pack_moving(context.moving) if context.moving else share[:0]
            summed = _sent_sum(torch.cat([share.to(moved.dtype), moved]))
            whole = _sent_rows(outputs.detach(), self.replicas.num_replicas)

        def finish_parts() -> tuple[Any, torch.Tensor]:
            received = _received(summed)
            if context.moving:
                move_together(context.moving, received[1:])
            return _received(whole), received[0].to(loss.dtype)

        return loss, finish_parts

    def test_loss(self, batch: PlacedBatch, outputs: Any, context: ReplicaContext | None) -> torch.Tensor:
        """The loss of the global batch; `outputs` of all of it."""
        loss = self._loss(batch, outputs, training=False)
        return loss if context is None else sum(context.penalties, loss)

    def metrics(self, batch: PlacedBatch, outputs: Any, loss: torch.Tensor) -> dict[str, Any]:
        """Adds the global batch to the metrics: what they are now."""
        inputs, targets, sample_weight, indices = batch
        self.model._loss_tracker.update_state(loss, sample_weight=len(indices))
        inputs = self._inputs_for("compute_metrics", inputs, len(indices))
        return self.model.compute_metrics(inputs, targets, outputs, sample_weight=sample_weight)

    def _loss(self, batch: PlacedBatch, outputs: Any, training: bool, rows: slice = slice(None)) -> torch.Tensor:
        import keras

        inputs, targets, sample_weight, indices = batch
        inputs = self._inputs_for("compute_loss", inputs, len(indices))
        targets, sample_weight = keras.tree.map_structure(
            lambda leaf: None if leaf is None else leaf[rows], (targets, sample_weight)
        )
        return self.model._compute_loss(
            x=inputs, y=targets, y_pred=outputs, sample_weight=sample_weight, training=training
        )

    def _inputs_for(self, method: str, inputs: Any, num_rows: int) -> Any:
        """The inputs of the global batch for a method that the user overrode; Keras' own does not look at them."""
        import keras

        own = getattr(type(self.model), method) is getattr(keras.Model, method)
        return inputs if own else self.replicas.gather(inputs, num_rows)


def _detached(outputs: Any) -> Any:
    import keras

    return keras.tree.map_structure(lambda leaf: leaf.detach(), outputs)


def _sent_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Begins to add a tensor up over the ranks. The functional form can be captured in a graph, too."""
    return _collectives.all_reduce(tensor, "sum", dist.group.WORLD.group_name)


def _sent_rows(rows: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Begins to concatenate the rows of all ranks."""
    return _collectives.all_gather_into_tensor(rows.contiguous(), num_ranks, dist.group.WORLD.group_name)


def _received(tensor: torch.Tensor) -> torch.Tensor:
    """Waits for what was begun."""
    return _collectives.wait_tensor(tensor)
