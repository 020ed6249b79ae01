"""Fused batch norm of a batch that is sharded over devices, with one collective forward and one backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def normalize(
    x: Any, axis: int, scale: Any, offset: Any, epsilon: float, num_replicas: int, everywhere: Callable[[Any], Any]
) -> tuple[Any, Any, Any]:
    """Normalizes `x`, as `kerasdp.backends.torch.batch_norm.normalize`.

    XLA (jax 0.10.2) makes two collectives of Keras' statistics, mean and then variance, and two of their
    gradients; each is a wait for all devices. Derivatives are taken backwards (also of derivatives), not by `jax.jvp`.

    Args:
        num_replicas: devices, each with as many rows of `x` as the others.
        everywhere: gives all devices the whole of a tensor.
    """
    wide = x if x.dtype in (jnp.float32, jnp.float64) else x.astype(jnp.float32)
    others = tuple(other for other in range(x.ndim) if other != axis)
    shape = [-1 if index == axis else 1 for index in range(x.ndim)]
    count = x.size // x.shape[axis]

    def forward(wide: Any, scale: Any, offset: Any) -> tuple[Any, Any]:
        shards = wide.reshape(num_replicas, -1, *wide.shape[1:])
        within = tuple(other + 1 for other in others)
        means = shards.mean(within, keepdims=True)
        statistics = means, jnp.square(shards - means).sum(within)
        means, squares = everywhere(jnp.stack([leaf.reshape(num_replicas, -1) for leaf in statistics]))
        # Chan et al. 1979: joins means and squared deviations without the cancellation of E[x^2] - E[x]^2.
        mean = means.mean(0)
        variance = (squares + count / num_replicas * jnp.square(means - mean)).sum(0) / count
        inverse = jax.lax.rsqrt(variance + epsilon)
        outputs = (wide - mean.reshape(shape)) * (inverse * scale).reshape(shape) + offset.reshape(shape)
        return (outputs, mean, variance), (wide, mean, inverse, scale)

    def backward(saved: Any, gradients: Any) -> tuple[Any, Any, Any]:
        wide, mean, inverse, scale = saved
        upstream = gradients[0]
        normalized = (wide - mean.reshape(shape)) * inverse.reshape(shape)
        for_offset, for_scale = jnp.stack([upstream.sum(others), (upstream * normalized).sum(others)])
        # What is left once the mean of the outputs and their spread are held.
        held = (for_offset.reshape(shape) + normalized * for_scale.reshape(shape)) / count
        return (upstream - held) * (inverse * scale).reshape(shape), for_scale, for_offset

    standardize = jax.custom_vjp(lambda *args: forward(*args)[0])
    standardize.defvjp(forward, backward)
    channels = jnp.zeros(x.shape[axis], wide.dtype)
    outputs, mean, variance = standardize(
        wide,
        channels + 1 if scale is None else scale.astype(wide.dtype),
        channels if offset is None else offset.astype(wide.dtype),
    )
    return outputs.astype(x.dtype), jax.lax.stop_gradient(mean), jax.lax.stop_gradient(variance)
