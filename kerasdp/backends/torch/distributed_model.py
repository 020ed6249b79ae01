"""PyTorch: wraps a model in DistributedDataParallel, with the weights that are trained."""

import statistics
import time
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.steps import all_variables
from kerasdp.backends.torch.train_step import ShardSteps
from kerasdp.portability.replica_context import ReplicaContext, use

# Passes by which the speed of a device is found: those that warm it up, and those that count.
_UNMEASURED, _MEASURED = 2, 5


def distributed(strategy: Any, model: Any, batch: DeviceBatch) -> Any:
    """Wraps the model in DistributedDataParallel, if it is to exchange gradients."""
    # DistributedDataParallel refuses a model without trainable weights.
    if strategy.num_replicas == 1 or strategy.host_sums is not None or not model.trainable_weights:
        return model
    used = _used_weights(strategy, model, batch)
    if not used:
        return model
    # Not all weights with `find_unused_parameters`: that (2.13) looks for them behind the outputs instead of the
    # loss, and makes new tensors of the outputs, without their masks.
    parallel = torch.nn.parallel.DistributedDataParallel(
        TrainedModel(model, used), device_ids=[strategy.device] if strategy.is_gpu else None
    )
    if strategy.config.gradient_precision == "bfloat16":
        # Through a function of another name: torch (2.13) refuses its own by name without NCCL, though Gloo sums
        # bfloat16, too.
        parallel.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    if strategy.num_replicas > 2:
        # After its first backward pass DistributedDataParallel (2.13) sorts the gradients into other buckets, as they
        # came. Where in a message a number stands decides in which order those of the ranks are added: the first step
        # after a resume would differ by round-off. The sum of two is the same in any order.
        _loss(strategy.context(model, len(batch.indices)), model, parallel, batch).backward()
        for variable in model.trainable_weights:
            variable.value.grad = None
    return parallel


def _loss(context: ReplicaContext | None, model: Any, module: Any, batch: DeviceBatch) -> Any:
    """Returns the loss of a batch by the model, or its wrapper; leaves no trace in any variable.

    `context`: of the step; None: this rank's rows are the batch.
    """
    import keras

    values = [(variable, variable.value) for variable in all_variables(model)]
    # Penalties of weights want the values by themselves (Keras 3.15).
    with keras.StatelessScope(values, collect_losses=True):
        steps = ShardSteps(model)
        with use(context):
            outputs = steps.forward(module, batch.inputs, context, training=True)
        return steps.global_batch(batch, outputs, context, training=True).loss


def _used_weights(strategy: Any, model: Any, batch: DeviceBatch) -> list[Any]:
    """Returns the values of the weights that the loss depends on: not those of an output without a loss."""
    context = strategy.context(model, len(batch.indices))
    used, seen, ahead = set(), set(), [_loss(context, model, model, batch).grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            used.add(id(getattr(node, "variable", None)))
            ahead += [following for following, _ in node.next_functions]
    return [variable.value for variable in model.trainable_weights if id(variable.value) in used]


def pass_seconds(strategy: Any, model: Any, batch: DeviceBatch) -> float:
    """Returns the seconds of this rank's passes with its rows, while the others do theirs; see `Strategy`."""
    weights = [weight.value for weight in model.trainable_weights]
    times = []
    for _ in range(_UNMEASURED + _MEASURED):
        torch.distributed.barrier()
        begin = time.perf_counter()
        gradients = torch.autograd.grad(_loss(None, model, model, batch), weights, allow_unused=True)
        del gradients
        if strategy.is_gpu:
            torch.cuda.synchronize(strategy.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[_UNMEASURED:])


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
