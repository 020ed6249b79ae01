"""Fused batch norm of a batch that is sharded over devices, with at most one collective forward and one backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def normalize(
    x: Any,
    axis: int,
    scale: Any,
    offset: Any,
    epsilon: float,
    num_replicas: int,
    everywhere: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Normalizes `x`, as `kerasdp.backends.torch.batch_norm.normalize`.

    XLA (jax 0.10.2) makes two collectives of Keras' statistics, mean and then variance, and two of their
    gradients; each is a wait for all devices. And where autodiff sums a product, it stores the product first.
    Derivatives are taken backwards (also of derivatives), not by `jax.jvp`.

    Args:
        num_replicas: devices, each with as many rows of `x` as the others.
        everywhere: gives all devices the whole of a tensor, for statistics of all rows. None: each has its own rows'.

    Returns:
        The outputs, and mean and variance of each channel; where each device has its own, their means.
    """
    wide = x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)
    # Within one of the groups of rows that are normalized together: its first axis counts them.
    within = tuple(other + 1 for other in range(x.ndim) if other != axis)
    shape = [1] + [-1 if index == axis else 1 for index in range(x.ndim)]
    groups = num_replicas if everywhere is None else 1
    count = x.size // x.shape[axis] // groups

    def grouped(tensor: Any, number: int = groups) -> Any:
        return tensor.reshape(number, -1, *x.shape[1:])

    def forward(wide: Any, scale: Any, offset: Any) -> tuple[Any, Any]:
        mean, variance = _statistics(grouped(wide, num_replicas), within, everywhere)
        mean, variance = mean.reshape(groups, *shape[1:]), variance.reshape(groups, *shape[1:])
        inverse = jax.lax.rsqrt(variance + epsilon)
        outputs = (grouped(wide) - mean) * (inverse * scale.reshape(shape)) + offset.reshape(shape)
        means = (leaf.mean(0).reshape(-1) for leaf in (mean, variance))
        return (outputs.reshape(wide.shape), *means), (wide, mean, inverse, scale)

    def backward(saved: Any, gradients: Any) -> tuple[Any, Any, Any]:
        wide, mean, inverse, scale = saved
        upstream = grouped(gradients[0])
        normalized = (grouped(wide) - mean) * inverse
        sums = jnp.stack([leaf.sum(within, keepdims=True) for leaf in (upstream, upstream * normalized)])
        # What is left once the mean of the outputs and their spread are held.
        held = (sums[0] + normalized * sums[1]) / count
        for_x = (upstream - held) * (inverse * scale.reshape(shape))
        for_offset, for_scale = sums.sum(1).reshape(2, -1)
        return for_x.reshape(wide.shape), for_scale, for_offset

    standardize = jax.custom_vjp(lambda *args: forward(*args)[0])
    standardize.defvjp(forward, backward)
    channels = jnp.zeros(x.shape[axis], wide.dtype)
    outputs, mean, variance = standardize(
        wide,
        channels + 1 if scale is None else scale.astype(wide.dtype),
        channels if offset is None else offset.astype(wide.dtype),
    )
    return outputs.astype(x.dtype), jax.lax.stop_gradient(mean), jax.lax.stop_gradient(variance)


def _statistics(shards: Any, within: tuple[int, ...], everywhere: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    """Returns mean and variance of each channel: of each shard, or, joined, of all."""
    means = shards.mean(within, keepdims=True)
    variances = jnp.square(shards - means).mean(within)
    means = means.reshape(variances.shape)
    if everywhere is None:
        return means, variances
    means, variances = everywhere(jnp.stack([means, variances]))
    # Chan et al. 1979: joins means and squared deviations without the cancellation of E[x^2] - E[x]^2.
    mean = means.mean(0)
    return mean, (variances + jnp.square(means - mean)).mean(0)
