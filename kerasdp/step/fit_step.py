"""Defines the training step of `fit` on each replica, from the rows of a batch to the update.

Each backend defines how a replica computes gradients, all-reduces and updates: see `Replica`.
"""

from typing import TYPE_CHECKING, Any

from kerasdp.contract import DeviceBatch, Trained
from kerasdp.run_state import Detail
from kerasdp.same.replica_context import use
from kerasdp.step.replica import Pass, Replica, learning_rate

if TYPE_CHECKING:
    from kerasdp.step.global_batch import GlobalBatch


def fit_step(replica: Replica, batch: DeviceBatch, detail: Detail) -> Trained:
    """Runs one training step on the global batch; each replica computes its shard.

    Numbers in brackets in the comments refer to the rules in docs/contributing/same-learning.md.

    Args:
        replica: the replica that runs this step.
        batch: the padded shard of the replica (1). On JAX, one replica stands for all devices, and has the whole batch.
        detail: which values of this step to record: see `Detail`.
    """
    from kerasdp.step.observer import observed, record_forward_pass

    model, passes = replica.model, replica.passes(batch)
    variables = model.trainable_weights[:]
    # With several passes (micro-batches), a forward pass has the outputs of only one micro-batch.
    detail = Detail.NOTHING if len(passes) > 1 else detail

    def forward_and_loss(one_pass: Pass) -> tuple[Any, "GlobalBatch", dict[str, Any]]:
        # The forward pass on the rows of this pass. Batch norms exchange their statistics (5), and layers know which
        # rows of the global batch they get (6).
        context = replica.context_of_pass(one_pass)
        with use(context), record_forward_pass(detail, model, one_pass.batch.inputs) as outputs_of_layers:
            outputs = replica.forward(replica.module, one_pass.batch.inputs, training=True)
        # What these rows add to the loss of the global batch (2, 4, 7), and to its metrics (3).
        global_batch = replica.loss_of_pass(one_pass, outputs, context)
        global_batch.count_metrics()
        return replica.scaled_loss(global_batch), global_batch, outputs_of_layers

    # Gradients and sums are added up over the passes.
    gradients, global_batch, outputs_of_layers = replica.add_up_passes(forward_and_loss, passes)
    # The mean of the gradients over the replicas (2); the sums of loss, metrics and moving statistics (3, 5).
    unpack = replica.all_reduce(gradients, global_batch.sums.to_reduce)
    means, sums = unpack()
    # If weights are sharded, whole gradients are gathered, but only when they are recorded.
    to_record = [] if detail == Detail.NOTHING else replica.whole_gradients(means)
    recorded = observed(detail, to_record, outputs_of_layers)
    rate = learning_rate(model.optimizer)  # of this step: read before the update

    def update() -> None:
        # TensorFlow compiles this as a separate function on GPUs. Tensors unpacked within it must not be used outside.
        # So it unpacks again, which sends nothing.
        own_means, own_sums = unpack()
        global_batch.store_sums(own_sums)
        global_batch.update_moving_statistics()
        if variables:
            model.optimizer.apply_gradients(zip(own_means, variables, strict=True))

    replica.update(update)  # the same on each replica; if weights are sharded, each updates its own shards
    loss = global_batch.store_sums(sums)
    # `update_metrics` gathers the outputs of all replicas, if a metric is not a sum over rows.
    return Trained(loss, rate, global_batch.update_metrics(loss), recorded)
