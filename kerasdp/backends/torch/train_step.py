"""Runs the training and evaluation steps of one PyTorch rank, on its shard of the global batch."""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kerasdp.backends.torch.collectives import gather_by_group, gather_rows, gather_statistics, sum_over_ranks
from kerasdp.backends.torch.gradients import detached
from kerasdp.backends.torch.private import all_reduce_async, wait
from kerasdp.backends.torch.update import updating
from kerasdp.contract import DeviceBatch, ShardPass, Trained
from kerasdp.data.sampling import ReplicaRows
from kerasdp.keras_compat.patches import replaced
from kerasdp.run_state import Detail
from kerasdp.same.replica_context import gather_shards, use
from kerasdp.step.fit_step import fit_step
from kerasdp.step.replica import Found, Gradients, LossOfPass, Pass, Received, ShardSteps, all_variables


class RankSteps(ShardSteps):
    """Runs the steps of one model on this rank's rows."""

    @torch.no_grad()
    def train(self, batch: DeviceBatch, detail: Detail) -> Trained:
        """Runs one training step (`fit_step`) eagerly. The attribute `module` must be the result of `distributed`."""
        for variable in self.model.trainable_weights:  # Keras' (3.15) `zero_grad` knows one of those that share a path
            variable.value.grad = None
        return fit_step(self, batch, detail)

    def differentiate(self, compute: LossOfPass, one: Pass) -> tuple[list[torch.Tensor | None], Any, Found]:
        """Computes the gradients of one pass. See `Replica.differentiate`.

        The `.grad` attributes of the weights add up the gradients of all passes. During the last backward pass,
        DistributedDataParallel averages these gradients over the ranks in buckets. Earlier passes return None for each
        weight.
        """
        variables = self.model.trainable_weights
        is_exchanged = one.is_last or not hasattr(self.module, "no_sync")
        with contextlib.nullcontext() if is_exchanged else self.module.no_sync(), torch.enable_grad():
            loss, global_batch, found = compute(one)
            if variables:
                loss.backward()
        return [variable.value.grad if one.is_last else None for variable in variables], global_batch, found

    def all_reduce(self, gradients: Gradients, to_reduce: dict[str, torch.Tensor]) -> Callable[[], Received]:
        """Averages the gradients that DistributedDataParallel has not averaged, and sums `to_reduce` over the ranks."""
        from kerasdp.keras_compat.layers import is_next_value

        variables = self.model.trainable_weights
        if self.strategy.split.num_replicas > 1:
            reduce_others(self.module, [variable for variable in variables if not is_next_value(variable)])
            gradients = self.with_next_values(gradients, self.next_values(gradients, variables))
            to_reduce = self.sums(to_reduce)
        return lambda: (gradients, to_reduce)

    def update(self, update: Callable[[], None]) -> None:
        """Runs the optimizer's update without waiting for the device."""
        with updating(self.model.optimizer):
            update()

    @torch.no_grad()
    def shard_pass(self, batch: DeviceBatch, with_loss: bool) -> ShardPass:
        """Runs a forward pass of training on this rank's rows, without gradients. See `ShardSteps.shard_pass`."""
        return super().shard_pass(batch, with_loss)

    def largest(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the elementwise maximum of each tensor over the ranks. An entry that is None stays None."""
        own = {str(place): tensor for place, tensor in enumerate(tensors) if tensor is not None}
        joined = flat(own)
        found = {} if joined is None else unflat(gather_by_group(joined).amax(0), own)
        return [found.get(str(place)) for place in range(len(tensors))]

    def rank(self) -> int:
        """Returns the rank of this process."""
        return self.strategy.processes.rank

    def gather_statistics(self, statistics: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Stacks the batch norm statistics of all ranks. See `ReplicaContext.gather`."""
        return gather_statistics(statistics, self.strategy.statistics_group, weight)

    def gather_shards(self, rows: torch.Tensor, own: ReplicaRows, replicas: tuple[ReplicaRows, ...]) -> torch.Tensor:
        """Gathers the rows of all ranks, without padding. See `ShardSteps.gather_shards`."""
        return gather_shards(rows, own, replicas, gather_rows)

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the ranks."""
        return wait(all_reduce_async(tensor))

    def sums(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Sums all tensors over the ranks, with a single all-reduce."""
        joined = flat(tensors)
        return {} if joined is None else unflat(self.add_up(joined), tensors)

    def own_step(self, name: str, batch: DeviceBatch, is_trial: bool = False) -> tuple[Any, Any]:
        """Runs a user-defined step on this rank's rows.

        Args:
            name: the name of the step method, such as `train_step`.
            batch: this rank's rows.
            is_trial: whether the step is a trial, in which no optimizer changes anything.

        Returns:
            Keras' logs, and the records of a trial. See `kerasdp.step.custom_steps.Share` for these records. The list
            of records is empty if `is_trial` is False.
        """
        import keras

        from kerasdp.keras_compat.models import as_keras_gives
        from kerasdp.step.custom_steps import join_steps, run_on_shard

        model, context = self.model, self.context(batch, name)
        found: list[Any] = []
        if context is None:
            logs = getattr(model, name)(as_keras_gives(batch[:3]))
        else:
            with contextlib.nullcontext() if is_trial else join_steps(model):
                logs, found = run_on_shard(
                    model, name, batch[:3], context, sum_over_ranks, self.build_optimizer, is_trial
                )
        return keras.tree.map_structure(detached, logs), found  # or they would keep the graph of gradients

    def distributed(self, batch: DeviceBatch) -> Any:
        """Wraps the model in DistributedDataParallel, if its gradients must be averaged over several ranks.

        Otherwise returns the model.
        """
        model, strategy = self.model, self.strategy
        # DistributedDataParallel refuses a model without trainable weights.
        if strategy.split.num_replicas == 1 or not model.trainable_weights:
            return model
        used = self._used_weights(batch)
        if not used:
            return model
        # `find_unused_parameters` (2.13) would search from the outputs instead of the loss. It would also replace the
        # outputs by new tensors without masks.
        parallel = torch.nn.parallel.DistributedDataParallel(
            TrainedModel(model, used),
            device_ids=[strategy.device] if strategy.is_gpu else None,
            gradient_as_bucket_view=True,  # no second copy of the gradients
        )
        if strategy.split.num_replicas > 2:
            # After its first backward pass DistributedDataParallel (2.13) sorts the gradients into other buckets, by
            # arrival. The place of a value in a message decides in which order the ranks' values are added. The first
            # step after a resume would differ by rounding errors. A sum of two values is the same in any order.
            self.loss(parallel, batch).backward()
            for variable in model.trainable_weights:
                variable.value.grad = None
        return parallel

    def loss(self, module: Any, batch: DeviceBatch) -> Any:
        """Returns the loss of a batch. If the batch is split, returns the loss of its first micro-batch only.

        The method changes no variable.

        Args:
            module: the model, or the module that wraps the model.
            batch: this rank's rows.
        """
        import keras

        values = [(variable, variable.value) for variable in all_variables(self.model)]
        first = self.passes(batch)[0]
        # Penalties of weights want the values by themselves (Keras 3.15).
        with keras.StatelessScope(values, collect_losses=True):
            with use(self.context_of_pass(first)) as context:
                outputs = self.forward(module, first.batch.inputs, training=True)
            return self.loss_of_pass(first, outputs, context).loss

    def _used_weights(self, batch: DeviceBatch) -> list[Any]:
        """Returns the values of the trainable weights that the loss depends on.

        For example, the loss does not depend on the weights of a model output without a loss.
        """
        from kerasdp.keras_compat.layers import is_next_value

        used, seen, ahead = set(), set(), [self.loss(self.model, batch).grad_fn]
        while ahead:
            node = ahead.pop()
            if node is not None and node not in seen:
                seen.add(node)
                used.add(id(getattr(node, "variable", None)))
                ahead += [following for following, _ in node.next_functions]
        weights = [each for each in self.model.trainable_weights if not is_next_value(each)]
        return [variable.value for variable in weights if id(variable.value) in used]


def reduce_others(parallel: Any, variables: list[Any]) -> None:
    """Averages over the ranks the gradients that DistributedDataParallel does not average.

    DistributedDataParallel averages only the gradients of weights that affected the loss of the first batch. The other
    weights may affect the loss of a later batch.

    Args:
        parallel: the model, or the DistributedDataParallel that wraps the model.
        variables: the weights whose gradients must be averaged.
    """
    known = {id(value) for value in parallel.module.weights} if hasattr(parallel, "module") else set()
    for variable in variables:
        gradient = variable.value.grad
        if id(variable.value) not in known and gradient is not None:
            torch.distributed.all_reduce(gradient)
            gradient /= torch.distributed.get_world_size()


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Concatenates tensors into one flat tensor of their common dtype. Returns None if there are no tensors."""
    if not tensors:
        return None
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors.values()])


def unflat(joined: torch.Tensor | None, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Splits a flat tensor into tensors with the shapes and dtypes of `tensors`.

    Args:
        joined: the result of `flat`, possibly summed over the ranks.
        tensors: the tensors that `flat` concatenated.
    """
    if joined is None:
        return {}
    parts = joined.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.reshape(tensor.shape).to(tensor.dtype) for part, (name, tensor) in zip(parts, tensors.items())}


# Arrays of up to this many bytes are sent from pinned memory, which PyTorch (2.13) never frees.
_SMALL = 2**16


class HostCopy:
    """Copies a scalar from a GPU to the host without blocking.

    Reading the value waits only for the step that computed the value. By contrast, `.item()` waits for all work that
    the GPU has received since that step.
    """

    def __init__(self, value: torch.Tensor):
        """Starts the copy. The GPU copies the value after all work that the GPU has received so far."""
        self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._value.copy_(value.detach(), non_blocking=True)
        self._is_sent = torch.cuda.Event()
        self._is_sent.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        self._is_sent.synchronize()
        return float(self._value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(float(self), dtype)

    def is_ready(self) -> bool:
        """Returns whether the GPU has computed the value and sent it to the host."""
        return self._is_sent.query()


def to_host(value: Any) -> Any:
    """Returns a scalar that can be read later without waiting for later steps. A scalar on a GPU becomes a `HostCopy`.

    Args:
        value: a tensor with one value. None, Python numbers and CPU tensors are returned unchanged.
    """
    return HostCopy(value) if isinstance(value, torch.Tensor) and value.is_cuda else value


def numbers_made_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which eager steps create scalars on the GPU instead of copying them from the host.

    On the CPU, the context changes nothing. Keras (3.15) converts each Python number to a tensor with
    `torch.as_tensor`, 30 times in a step of a small net. PyTorch (2.13) copies the number from the host, and waits
    until the GPU has received it. So PyTorch also waits for all earlier work of the GPU. The context affects only the
    current thread, and not the threads that read data. The context will be unnecessary when Keras itself creates
    scalars on the GPU.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    original, own_thread = torch.as_tensor, threading.get_ident()

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        is_sent = device is not None and torch.device(device).type == "cuda" and not isinstance(data, torch.Tensor)
        if not is_sent or threading.get_ident() != own_thread:
            return original(data, dtype=dtype, device=device)
        if type(data) in (bool, int, float):
            return torch.full((), data, dtype=dtype, device=device)
        on_host = original(data, dtype=dtype)
        if on_host.nbytes > _SMALL:
            return on_host.to(device)
        return on_host.pin_memory().to(device, non_blocking=True)

    return replaced(torch, as_tensor=as_tensor)


class TrainedModel(torch.nn.Module):
    """Wraps a model as a torch module. The parameters of this module are exactly the given weights, each once.

    A Keras (3.15) model is also a torch module, but it identifies weights by path, and two weights may have the same
    path. Its list of parameters is also fixed when the model is built. With a Keras model, DistributedDataParallel
    would skip some weights. It would also wait for gradients of weights that have no gradient.
    """

    def __init__(self, model: Any, weights: list[Any]):
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)
        self._call = model.__call__  # not the model itself, whose parameters would be this module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the model's outputs."""
        return self._call(*args, **kwargs)
