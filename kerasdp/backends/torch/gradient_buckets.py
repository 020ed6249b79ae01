"""PyTorch: averages gradients across the ranks within a captured step."""

from typing import Any

import torch

from kerasdp.backends.torch.private import all_reduce_async, wait

# The bucket size of DistributedDataParallel.
_BUCKET_BYTES = 25 * 2**20


class GradientBuckets:
    """Averages gradients across replicas in buckets, overlapping with the backward pass."""

    def __init__(self, strategy: Any, leaves: dict[int, torch.Tensor]):
        """Hooks itself to the gradients of `leaves`, by the id of their variable."""
        self.num_replicas = strategy.num_replicas
        # Gradients that wait to be sent, by the id of their variable; and what was sent, with the sum on its way.
        self.bucket: list[tuple[int, torch.Tensor]] = []
        self.sent: list[tuple[list[tuple[int, torch.Tensor]], torch.Tensor]] = []
        self.is_bfloat16 = strategy.config.gradient_precision == "bfloat16"
        if strategy.num_replicas > 1:
            for key, leaf in leaves.items():
                leaf.register_hook(lambda gradient, key=key: self._add(key, gradient))

    def _add(self, key: int, gradient: torch.Tensor) -> None:
        if self.bucket and self.bucket[0][1].dtype != gradient.dtype:
            self._send()
        self.bucket.append((key, gradient))
        if sum(gradient.nbytes for _, gradient in self.bucket) >= _BUCKET_BYTES:
            self._send()

    def _send(self, shared: torch.Tensor | None = None) -> None:
        bucket, self.bucket = self.bucket, []
        flat = torch.cat([gradient.reshape(-1) for _, gradient in bucket])
        flat = (flat.to(torch.bfloat16) if self.is_bfloat16 else flat) / self.num_replicas
        self.sent.append((bucket, all_reduce_async(flat if shared is None else torch.cat([flat, shared]))))

    def mean(
        self, gradients: tuple[torch.Tensor | None, ...], variables: list[Any], shared: torch.Tensor | None
    ) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        """Returns the averaged gradients of these variables, and the sum of `shared`.

        `shared` is sent together with the last gradients: each collective costs a wait for all ranks.
        """
        if self.num_replicas == 1:
            return list(gradients), shared
        dtypes = {gradient.dtype for _, gradient in self.bucket}
        joins_last_bucket = shared is not None and not self.is_bfloat16 and dtypes == {shared.dtype}
        sums = None if shared is None or joins_last_bucket else all_reduce_async(shared)
        if self.bucket:
            self._send(shared if joins_last_bucket else None)
        averaged: dict[int, torch.Tensor] = {}
        rest = None
        for bucket, flat in self.sent:
            flat, sizes = wait(flat), [gradient.numel() for _, gradient in bucket]
            *values, rest = flat.to(bucket[0][1].dtype).split([*sizes, flat.numel() - sum(sizes)])
            averaged |= {key: value.reshape(gradient.shape) for (key, gradient), value in zip(bucket, values)}
        total = wait(sums) if sums is not None else rest if joins_last_bucket else None
        return [averaged.get(id(variable)) for variable in variables], total
