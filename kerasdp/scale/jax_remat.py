"""Recomputes a layer in the backward pass on JAX: see `kerasdp.scale.remat`."""

from typing import Any

import jax
import jax.numpy as jnp

from kerasdp.keras_compat.patches import current_step


def rematerialized(block: Any) -> Any:
    """Calls the layer of `block`, so that the backward pass recomputes the layer. Returns the layer's outputs.

    `block` is a `kerasdp.scale.remat.Block`.
    """

    def run(tensors: list[jax.Array]) -> list[jax.Array]:
        return block.run(tensors, [])

    again = _with_own_gradient if current_step().is_within_checkpoint else jax.checkpoint
    return block.finish(again(run)(block.tensors))


def _with_own_gradient(run: Any) -> Any:
    """Replaces `jax.checkpoint` within an outer `jax.checkpoint` whose policy keeps values.

    JAX (0.10.2) would apply the policy of the outer checkpoint to the inner checkpoint, and so keep the inner values.
    """

    def call(tensors: list[jax.Array]) -> list[jax.Array]:
        # Not by `jax.closure_convert`: among the values that the layer closes over, it finds only floats.
        closed = jax.make_jaxpr(run)(tensors)

        @jax.custom_vjp
        def compute(tensors: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
            return jax.core.eval_jaxpr(closed.jaxpr, others, *tensors)

        def backward(kept: Any, upstream: Any) -> Any:
            floats = [one for one in upstream if jnp.issubdtype(one.dtype, jnp.inexact)]
            kept, _ = jax.lax.optimization_barrier((kept, floats))
            return jax.vjp(lambda *kept: jax.core.eval_jaxpr(closed.jaxpr, kept[1], *kept[0]), *kept)[1](upstream)

        compute.defvjp(lambda tensors, others: (compute(tensors, others), (tensors, others)), backward)
        return compute(tensors, list(closed.consts))

    return call
