"""Computes fused batch norm for training on torch, over the rows of one replica or of the global batch."""

from typing import Any

import torch

from kerasdp.backends.torch.collectives import sum_gradients
from kerasdp.backends.torch.private import is_being_captured


def normalize(
    x: Any,
    axis: int,
    scale: Any,
    offset: Any,
    epsilon: float,
    num_rows: int | None = None,
    gather: Any = None,
    weight: float = 1.0,
) -> tuple[Any, Any, Any]:
    """Normalizes `x` for training like Keras' batch norm layer on torch (3.15), in one fused function.

    On GPUs, the function uses torch's kernel if `gather` is None. On CPUs, it never uses torch's kernel (2.13), because
    the kernel is less exact. For images with channels last, the kernel sums one value after the other. Its mean,
    variance and gradients of 61 images of 28x28 have errors of 1e-5. The errors of `normalize` are 2e-7, and 2e-6 in a
    captured step that Inductor has fused.

    Args:
        x: a tensor with at least two axes. float16 and bfloat16 values are computed in float32.
        axis: the index of the channel axis, counted from 0.
        scale: a tensor of shape `(channels,)`, or None.
        offset: a tensor of shape `(channels,)`, or None.
        epsilon: the value that is added to the variance.
        num_rows: the number of rows before the padding rows, or None if `x` has no padding.
        gather: `ReplicaContext.gather`, or None. With `gather`, mean and variance are computed over all replicas.
            Gradients of gradients then raise an error.
        weight: `ReplicaContext.weight`.

    Returns:
        The outputs, and the mean and variance of each channel.
    """
    if gather is None and x.is_cuda and x.numel() and not is_being_captured(x):
        return normalize_natively(x, axis, scale, offset, epsilon)
    kind = _Normalize if gather is None else _NormalizeTogether
    return kind.apply(x, scale, offset, axis, epsilon, num_rows, gather, weight)


def normalize_natively(x: Any, axis: int, scale: Any, offset: Any, epsilon: float) -> tuple[Any, Any, Any]:
    """Normalizes `x` with torch's kernels. `x` must have at least one row.

    On a GPU, these kernels make two passes over the data. `_Normalize` makes ten passes. See `normalize` for the
    arguments and results.
    """
    is_flat = x.dim() not in (4, 5) and axis == x.dim() - 1
    # With four or five axes, channels that lie last are a memory format of torch's; with two they lie last anyway.
    channels_second = x.reshape(-1, x.shape[-1]) if is_flat else x.movedim(axis, 1)
    dtype = _wide(x).dtype
    weight, bias = (None if each is None else each.to(dtype) for each in (scale, offset))
    if weight is None and bias is not None:
        # Without a weight CUDA's kernel returns an empty gradient of the bias (torch 2.11, on an H200): "returned an
        # invalid gradient at index 2 - got [0] but expected shape compatible with [32]".
        weight = torch.ones_like(bias)
    outputs, mean, inverse = torch.native_batch_norm(channels_second, weight, bias, None, None, True, 0.0, epsilon)
    # It has the rounding error of variance + epsilon, and only this sum is used.
    variance = (inverse.square().reciprocal() - epsilon).clamp(min=0)
    return outputs.reshape(x.shape) if is_flat else outputs.movedim(1, axis), mean, variance


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        scale: Any,
        offset: Any,
        axis: int,
        epsilon: float,
        num_rows: int | None,
        gather: Any,
        weight: float,
    ) -> tuple[Any, Any, Any]:
        ctx.others = [other for other in range(x.dim()) if other != axis]
        ctx.shape = [-1 if index == axis else 1 for index in range(x.dim())]
        wide = _wide(x)
        centered, own_mean, variance = _centered(wide[:num_rows], ctx.others)
        mean, ctx.count = own_mean, centered.numel() // own_mean.numel()
        if gather is not None:
            count = own_mean.new_full(own_mean.shape, ctx.count)
            counts, means, squares = gather(torch.stack([count, own_mean, count * variance]).flatten(1)).unbind(1)
            # Chan et al. 1979: joins means and squared deviations without the cancellation of E[x^2] - E[x]^2.
            ctx.count = counts.sum(0)
            mean = (counts * means).sum(0) / ctx.count
            variance = ((squares + counts * (means - mean).square()).sum(0) / ctx.count).reshape(ctx.shape)
            mean = mean.reshape(ctx.shape)
        inverse = torch.rsqrt(variance + epsilon)
        factor = inverse if scale is None else inverse * _wide(scale).reshape(ctx.shape)
        shift = (own_mean - mean) * factor  # corrects for centering by this rank's mean
        if offset is not None:
            shift = shift + _wide(offset).reshape(ctx.shape)
        if num_rows is not None:
            centered = wide - own_mean
        outputs = centered.mul_(factor).add_(shift)
        ctx.save_for_backward(x, mean, inverse, scale)
        ctx.num_rows, ctx.gather, ctx.weight, ctx.epsilon = num_rows, gather, weight, epsilon
        ctx.has_offset = offset is not None
        mean, variance = mean.reshape(-1).clone(), variance.reshape(-1)
        ctx.mark_non_differentiable(mean, variance)
        return outputs.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any, __: Any) -> tuple[Any, ...]:
        x, mean, inverse, scale = ctx.saved_tensors
        wide, is_differentiated = _wide(gradient), torch.is_grad_enabled()
        if is_differentiated:  # gradients of these gradients will be needed, through mean and variance, too
            mean = _wide(x).mean(ctx.others, keepdim=True)
            inverse = torch.rsqrt((_wide(x) - mean).square().mean(ctx.others, keepdim=True) + ctx.epsilon)
        factor = inverse if scale is None else inverse * _wide(scale).reshape(ctx.shape)
        normalized = _wide(x) - mean
        normalized = normalized * inverse if is_differentiated else normalized.mul_(inverse)
        # Padding has no gradient.
        own = torch.stack([wide.sum(ctx.others), (wide * normalized).sum(ctx.others)])
        sums = own if ctx.gather is None else sum_gradients(own, ctx.gather, ctx.weight).sum(0)
        # These terms are the gradients that flow through mean and variance.
        for_offset, for_scale = (each.reshape(ctx.shape) for each in sums / ctx.count)
        if is_differentiated:
            for_x = (wide - for_offset - normalized * for_scale) * factor
        else:
            for_x = normalized.mul_(-for_scale).add_(wide).sub_(for_offset).mul_(factor)
        if ctx.num_rows is not None:
            for_x[ctx.num_rows :] = 0
        return (
            for_x.to(x.dtype),
            None if scale is None else own[1].to(scale.dtype),
            own[0] if ctx.has_offset else None,
            *[None] * 5,
        )


class _NormalizeTogether(_Normalize):
    backward: Any = staticmethod(torch.autograd.function.once_differentiable(_Normalize.backward))


def _centered(x: Any, others: list[int]) -> tuple[Any, Any, Any]:
    """Returns a tensor minus its mean, the mean, and the variance. `others` are the axes to average over.

    The mean and the variance are zero if the tensor has no rows.
    """
    if x.numel() == 0:
        nothing = x.sum(others, keepdim=True)
        return x, nothing, nothing
    if is_being_captured(x):  # it is being compiled, and will be fused
        variance, mean = torch.var_mean(x, others, correction=0, keepdim=True)
        return x - mean, mean, variance
    # torch.var_mean takes ten times as long over the first axes (2.13, on the CPU)
    mean = x.mean(others, keepdim=True)
    centered = x - mean
    return centered, mean, (centered * centered).mean(others, keepdim=True)


def _wide(tensor: Any) -> Any:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
