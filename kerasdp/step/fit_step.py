"""Holds the training step of `fit`: what it computes, from the rows of a batch to the update, on each replica.

How a replica differentiates, exchanges and updates is its backend's: see `Replica`.
"""

from typing import TYPE_CHECKING, Any

from kerasdp.contract import DeviceBatch, Trained
from kerasdp.run_state import Detail
from kerasdp.same.replica_context import use
from kerasdp.step.replica import Pass, Replica, learning_rate

if TYPE_CHECKING:
    from kerasdp.step.global_batch import GlobalBatch


def fit_step(replica: Replica, batch: DeviceBatch, detail: Detail) -> Trained:
    """Trains on the global batch. The numbers in brackets refer to docs/internals/same-learning.md.

    Args:
        replica: of the model.
        batch: its shard of the batch, with padding (1); on jax, where one replica stands for all devices, the batch.
        detail: what to record.
    """
    from kerasdp.step.observer import forward_pass, observed

    model, passes = replica.model, replica.passes(batch)
    variables = model.trainable_weights[:]
    detail = Detail.NOTHING if len(passes) > 1 else detail  # no pass of several has the gradients of the batch

    def loss_of_own_rows(one: Pass) -> tuple[Any, "GlobalBatch", dict[str, Any]]:
        # The forward pass on the shard: batch norms exchange their statistics (5), layers know their rows (6).
        context = replica.context_of_pass(one)
        with use(context), forward_pass(detail, model, one.batch.inputs) as found:
            outputs = replica.forward(replica.module, one.batch.inputs, training=True)
        # The share of these rows in the loss of the global batch (2, 4, 7), and in its metrics (3).
        share = replica.trained_pass(one, outputs, context)
        share.share_metrics()
        return replica.scaled_loss(share), share, found

    gradients, share, found = replica.add_up_passes(loss_of_own_rows, passes)
    # The mean of the gradients over the replicas (2); the sums of loss, metrics and moving statistics (3, 5).
    unpack = replica.all_reduce(gradients, share.sums.shared)
    means, sums = unpack()
    # With shards of weights, whole gradients are gathered: only to be recorded.
    recorded = [] if detail == Detail.NOTHING else replica.whole_gradients(means)
    seen, rate = observed(detail, recorded, found), learning_rate(model.optimizer)

    def update() -> None:
        # TensorFlow compiles this by itself on GPUs: it unpacks its own tensors, which must not leave it. Nothing is
        # sent again.
        means, sums = unpack()
        share.take(sums)
        share.move_statistics()
        if variables:
            model.optimizer.apply_gradients(zip(means, variables, strict=True))

    replica.update(update)  # the same on each replica
    loss = share.take(sums)
    # Gathers the outputs of all replicas, if a metric is no sum over the rows.
    return Trained(loss, rate, share.update_metrics(loss), seen)
