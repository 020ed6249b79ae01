"""Gathering over the ranks of torch, with the gradients that training on one global batch needs."""

from typing import Any

import torch
import torch.distributed as dist


def all_gather_stacked(tensor: torch.Tensor) -> torch.Tensor:
    """Stacks the tensor of all ranks along a new first axis."""
    # torch 2.13 renamed it, and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    tensor = tensor.contiguous()
    gathered = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    gather(gathered.flatten(0, 1) if tensor.dim() else gathered, tensor)
    return gathered


class _GatherRows(torch.autograd.Function):
    """Concatenates the rows of all ranks; see `Replicas.gather` for its gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.num_rows = len(rows)
        return all_gather_stacked(rows).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        first = dist.get_rank() * ctx.num_rows
        return dist.get_world_size() * gradient[first : first + ctx.num_rows]


class _GatherStatistics(torch.autograd.Function):
    """Stacks a tensor of all ranks; a rank's gradient is the sum over what all ranks made of its tensor."""

    @staticmethod
    def forward(ctx: Any, statistics: torch.Tensor) -> torch.Tensor:
        return all_gather_stacked(statistics)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


# Functions of a tensor, with gradients.
gather_rows = _GatherRows.apply
gather_statistics = _GatherStatistics.apply
