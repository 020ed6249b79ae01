"""JAX: gradients of steps that people write.

Loaded by the backend's name.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr


def differentiate(
    compute: Callable[[list[Any]], tuple[Any, Any]], values: list[Any], variables: list[Any]
) -> tuple[Any, Any, list[Any]]:
    """Computes a value, and takes its gradients; as with torch."""
    from kerasdp.keras_compat.layers import InnerScope

    scopes: list[InnerScope] = []

    def run(*values: Any) -> tuple[Any, Any]:
        # What is assigned must leave through here: JAX lets nothing else out of a function that it differentiates.
        with InnerScope(zip(variables, values)) as scope:
            value, aux = compute(list(values))
        scopes.append(scope)
        return value, (aux, scope.assigned_values())

    # As `jax.value_and_grad` does, which gives zeros for what the value does not depend on.
    value, derivative, (aux, assigned) = jax.linearize(run, *values, has_aux=True)
    gradients = jax.linear_transpose(derivative, *values)(jnp.ones_like(value))
    # What is left of a program without what its result does not depend on.
    _, reached = dce_jaxpr(jax.make_jaxpr(derivative)(*values).jaxpr, [True])
    scopes[-1].write_back(assigned)
    return value, aux, [gradient if is_reached else None for gradient, is_reached in zip(gradients, reached)]
