"""PyTorch: gathers tensors of all ranks, with the gradients that training on one global batch needs."""

from typing import Any

import torch
import torch.distributed as dist

from kerasdp.backends.torch import sockets
from kerasdp.backends.torch.private import all_gather_functional, is_being_captured


def all_gather_stacked(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Stacks the tensor of all ranks of a group along a new first axis."""
    if group is None and sockets.takes(tensor):
        return sockets.gather(tensor)
    # torch 2.13 renamed it, and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    tensor = tensor.contiguous()
    if is_being_captured(tensor):  # a step is being captured: the functional form
        rows = tensor if tensor.dim() else tensor.reshape(1)
        return all_gather_functional(rows, group).reshape(dist.get_world_size(group), *tensor.shape)
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    gather(gathered.flatten(0, 1) if tensor.dim() else gathered, tensor, group=group)
    return gathered


def sum_over_ranks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sums each tensor over all ranks, in one message for each type; sparse ones become dense."""
    sums: list[torch.Tensor] = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in sums):
        places = [place for place, tensor in enumerate(sums) if tensor.dtype == dtype]
        flat = torch.cat([sums[place].detach().reshape(-1) for place in places])
        dist.all_reduce(flat)
        for place, part in zip(places, flat.split([sums[place].numel() for place in places])):
            sums[place] = part.reshape(sums[place].shape)
    return sums


def gather_rows(rows: torch.Tensor, group: Any = None, factor: float | None = None) -> torch.Tensor:
    """Concatenates the rows of all ranks of a group.

    Args:
        rows: equally many on each rank.
        group: None: all ranks.
        factor: by which the gradient is multiplied. None: the number of ranks, for gradients that are averaged.
    """
    return _GatherRows.apply(rows, group, dist.get_world_size(group) if factor is None else factor)


def gather_statistics(statistics: torch.Tensor, group: Any = None, weight: float = 1.0) -> torch.Tensor:
    """Stacks a tensor of all ranks; a rank's gradient is the sum of its tensor's gradients on all ranks.

    `weight`: of this rank's gradients, once they are averaged over the ranks; the mean of all is 1.
    """
    return _GatherStatistics.apply(statistics, group, weight)


def sum_gradients(gradient: torch.Tensor, gather: Any, weight: float) -> torch.Tensor:
    """Sums a gradient over the ranks, each by the weight that it will have.

    Args:
        gradient: of what all ranks share, on this rank.
        gather: stacks the gradients of all ranks.
        weight: of this rank; 0 if it has no rows: its gradients are then nothing, and not needed.

    Returns:
        What this rank's part of the weighted sum is before its own weight.
    """
    if weight == 1.0:
        return gather(gradient)
    gathered = gather(gradient * weight if weight else torch.zeros_like(gradient))
    return gathered / weight if weight else torch.zeros_like(gathered)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, factor: float) -> torch.Tensor:
        ctx.first, ctx.num_rows, ctx.factor = dist.get_rank(group) * len(rows), len(rows), factor
        return all_gather_stacked(rows, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.factor * gradient[ctx.first : ctx.first + ctx.num_rows], None, None


class _GatherStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, statistics: torch.Tensor, group: Any, weight: float) -> torch.Tensor:
        ctx.group, ctx.weight = group, weight
        return all_gather_stacked(statistics, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gathered = sum_gradients(gradient, lambda own: all_gather_stacked(own, ctx.group), ctx.weight)
        return gathered[:, dist.get_rank(ctx.group)].sum(0), None, None
