"""PyTorch: trains and evaluates on the global batch, of which each rank has its shard."""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from kerasdp.backends.base import DeviceBatch, ShardPass, Trained
from kerasdp.backends.steps import all_variables, learning_rate
from kerasdp.backends.torch.private import all_reduce_async, wait
from kerasdp.backends.torch.waits import updating_on
from kerasdp.keras_compat.patches import wrapped
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.run_state import Detail

if TYPE_CHECKING:
    from kerasdp.portability.global_batch import GlobalBatch


def train_step(
    strategy: Any, model: Any, parallel: Any, steps: "ShardSteps", batch: DeviceBatch, detail: Detail
) -> Trained:
    """Trains on the global batch, of which this rank has its shard, layer by layer. `CompiledTraining` does the same.

    The numbers are those of docs/internals/same-learning.md.

    Args:
        strategy: `DataParallel`.
        model: that is trained.
        parallel: the model, in DistributedDataParallel if there are other ranks.
        steps: of the model.
        batch: this rank's rows, with padding (1).
        detail: what to record.
    """
    from kerasdp.backends.observer import forward_pass, observed

    variables = model.trainable_weights[:]
    context = strategy.context(model, len(batch.indices))
    # The forward pass on the shard; batch norms exchange their statistics (5), layers know their rows (6).
    with use(context), forward_pass(detail, model, batch.inputs) as found:
        outputs = steps.forward(parallel, batch.inputs, training=True)
    for variable in variables:  # Keras' (3.15) `zero_grad` knows one of the weights that share a path
        variable.value.grad = None
    # The share of these rows in the loss of the global batch (2, 4, 7), and in its metrics (3).
    whole = steps.global_batch(batch, outputs, context, training=True)
    with torch.no_grad():
        whole.share_metrics()
    shared = flat(whole.shared)
    shared = None if shared is None else all_reduce_async(shared)  # overlaps with the backward pass
    # The backward pass, and the mean of the gradients over the ranks (2), in buckets as they come.
    if variables:
        model.optimizer.scale_loss(whole.loss).backward()
        if strategy.host_sums is not None:
            strategy.host_sums.mean(variables)
        elif strategy.num_replicas > 1:
            reduce_others(parallel, variables)
    gradients = [variable.value.grad for variable in variables]
    with torch.no_grad():
        # Loss and metrics of the global batch (3); moving statistics (5).
        loss = whole.take(unflat(None if shared is None else wait(shared), whole.shared))
        whole.move_statistics()
        seen = observed(detail, gradients, found)  # before the optimizer, which may clip them in place
        # The update, the same on each rank.
        rate = learning_rate(model.optimizer)
        with updating_on(strategy.device, model.optimizer):
            model.optimizer.apply(gradients, variables)
        return Trained(loss, rate, whole.update_metrics(loss), seen)


class ShardSteps:
    """Computes what the steps of one model have in common, on this rank's rows."""

    def __init__(self, model: Any):
        self.model = model

    def forward(self, module: Any, inputs: Any, training: bool) -> Any:
        """Computes the outputs of this rank's rows. `module`: the model, maybe in DistributedDataParallel."""
        arguments = {"training": training} if "training" in self.model.call_signature_parameters else {}
        return module(inputs, **arguments)

    def test(self, batch: DeviceBatch, context: ReplicaContext | None) -> dict[str, Any]:
        """Evaluates the global batch; returns Keras' logs."""
        with use(context):
            outputs = self.forward(self.model, batch.inputs, training=False)
        whole = self.global_batch(batch, outputs, context, training=False)
        whole.share_metrics()
        return whole.update_metrics(whole.take(sums_over_ranks(whole.shared)))

    def predict(self, batch: DeviceBatch, context: ReplicaContext | None) -> Any:
        """Computes the outputs of the global batch."""
        with use(context):
            outputs = self.forward(self.model, batch.inputs, training=False)
            return outputs if context is None else context.whole_outputs(outputs)

    def global_batch(
        self, batch: DeviceBatch, outputs: Any, context: ReplicaContext | None, *, training: bool
    ) -> "GlobalBatch":
        """Computes the loss, from the outputs of this rank's rows."""
        from kerasdp.portability.global_batch import Data, GlobalBatch

        inputs, targets, sample_weight, indices = batch
        padded = Data(inputs, targets, outputs, sample_weight)
        return GlobalBatch(self.model, context, padded, len(indices), training=training, add_up=_add_up)


@torch.no_grad()
def shard_passes(model: Any, batch: DeviceBatch, context: ReplicaContext | None) -> list[ShardPass]:
    """Runs a forward pass of training on this process's replica; no variable changes."""
    import keras

    from kerasdp.backends.observer import shard_outputs
    from kerasdp.portability.row_search import fixed_values

    steps = ShardSteps(model)
    if context is None:
        return []
    with keras.StatelessScope(fixed_values(model), collect_losses=True):
        with use(context), shard_outputs(model) as layers:
            outputs = steps.forward(model, batch.inputs, training=True)
        whole = steps.global_batch(batch, outputs, context, training=True)
        loss = whole.take(sums_over_ranks(whole.shared))
    leaves = [] if whole.is_of_own_rows else keras.tree.flatten(whole.whole().outputs)
    return [ShardPass(layers, leaves, loss, context.first_row, context.num_rows, context.rows or 0)]


def reduce_others(parallel: Any, variables: list[Any]) -> None:
    """Takes the mean over the ranks of gradients that DistributedDataParallel does not know.

    Those of weights that the first batch's loss did not depend on: a part of the model may come into use later.
    """
    known = {id(value) for value in parallel.module.weights} if hasattr(parallel, "module") else set()
    for variable in variables:
        gradient = variable.value.grad
        if id(variable.value) not in known and gradient is not None:
            torch.distributed.all_reduce(gradient)
            gradient /= torch.distributed.get_world_size()


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Joins tensors into one, of the widest of their types; None if there are none. See `unflat`."""
    if not tensors:
        return None
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors.values()])


def unflat(joined: torch.Tensor | None, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Takes apart what `flat` has joined of these tensors, or sums of it."""
    if joined is None:
        return {}
    parts = joined.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.reshape(tensor.shape).to(tensor.dtype) for part, (name, tensor) in zip(parts, tensors.items())}


def sums_over_ranks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Sums tensors over the ranks, in one message."""
    joined = flat(tensors)
    return {} if joined is None else unflat(_add_up(joined), tensors)


def _add_up(tensor: torch.Tensor) -> torch.Tensor:
    return wait(all_reduce_async(tensor))


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` see means.

    `mean`: of gradients, over the ranks, where a step wants that.
    """

    def of_means(clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for weight, gradient in zip(weights, mean([weight.grad for weight in weights])):
            weight.grad = gradient
        return clip(weights, *args, **kwargs)

    return wrapped(torch.nn.utils, clip_grad_norm_=of_means, clip_grad_value_=of_means)


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
            outputs = steps.forward(module, batch.inputs, training=True)
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
