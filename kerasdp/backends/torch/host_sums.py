"""PyTorch: adds gradients in host memory, by Gloo, instead of on the GPUs."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# As in `gradient_buckets`: while one is being added, the next one is copied.
_BUCKET_BYTES = 25 * 2**20


class HostSums:
    """Sums tensors over the ranks in host memory.

    A device holds the gradients alone: neither the buckets of DistributedDataParallel, which are as large, nor what
    NCCL takes for itself.
    """

    def __init__(self, device: torch.device, timeout: timedelta, precision: str = "float32"):
        """Opens a group; called by all ranks. `precision`: in which `mean` sends: `Config.gradient_precision`."""
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._is_pinned, self._is_bfloat16 = device.type == "cuda", precision == "bfloat16"
        self._buffers: dict[Any, torch.Tensor] = {}

    def mean(self, variables: list[Any]) -> None:
        """Replaces the gradients of these variables by their means over the ranks."""
        gradients = [variable.value.grad for variable in variables if variable.value.grad is not None]
        self._sum(gradients, self._is_bfloat16)
        for gradient in gradients:
            gradient /= dist.get_world_size(self._group)

    def sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sums each tensor over all ranks, as `kerasdp.backends.torch.collectives.sum_over_ranks`."""
        sums = [(tensor.to_dense() if tensor.is_sparse else tensor).detach().clone() for tensor in tensors]
        self._sum(sums, False)
        return sums

    @torch.no_grad()
    def _sum(self, tensors: list[torch.Tensor], is_bfloat16: bool) -> None:
        sent = []
        for number, bucket in enumerate(_buckets(tensors)):
            dtype = torch.bfloat16 if is_bfloat16 else bucket[0].dtype
            host = self._buffer(number, sum(tensor.numel() for tensor in bucket), dtype)
            parts = host.split([tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts):
                part.copy_(tensor.reshape(-1), non_blocking=self._is_pinned)
            if self._is_pinned:
                torch.cuda.current_stream().synchronize()  # Gloo reads what has come
            sent.append((bucket, parts, dist.all_reduce(host, group=self._group, async_op=True)))
        for bucket, parts, work in sent:
            work.wait()
            for tensor, part in zip(bucket, parts):
                tensor.copy_(part.reshape(tensor.shape), non_blocking=self._is_pinned)

    def _buffer(self, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        key = number, size, dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(size, dtype=dtype, device="cpu", pin_memory=self._is_pinned)
        return self._buffers[key]


def _buckets(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the tensors in groups of one type and some bytes, the same on each rank."""
    buckets: list[list[torch.Tensor]] = []
    for tensor in tensors:
        last = buckets[-1] if buckets else []
        if not last or last[0].dtype != tensor.dtype or sum(each.nbytes for each in last) >= _BUCKET_BYTES:
            buckets.append(last := [])
        last.append(tensor)
    return buckets
