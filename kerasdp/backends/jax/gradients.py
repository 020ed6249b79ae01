"""Computes the gradients of user-defined steps on JAX.

`kerasdp.value_and_grad` imports the module `gradients` of the current backend.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr


def differentiate(
    compute: Callable[[list[Any]], tuple[Any, Any]], values: list[Any], variables: list[Any]
) -> tuple[Any, Any, list[Any]]:
    """Computes a value and its gradients. See `kerasdp.backends.torch.gradients.differentiate`."""
    from kerasdp.keras_compat.layers import InnerScope

    scopes: list[InnerScope] = []

    def run(*values: Any) -> tuple[Any, Any]:
        # Assigned values must be returned: a function that JAX differentiates has no other way out for them.
        with InnerScope(zip(variables, values)) as scope:
            value, aux = compute(list(values))
        scopes.append(scope)
        return value, (aux, scope.assigned_values())

    # As `jax.value_and_grad` does, which gives zeros for what the value does not depend on.
    value, derivative, (aux, assigned) = jax.linearize(run, *values, has_aux=True)
    gradients = jax.linear_transpose(derivative, *values)(jnp.ones_like(value))
    # Removes dead code from the program, and finds the inputs that its result depends on.
    _, reached = dce_jaxpr(jax.make_jaxpr(derivative)(*values).jaxpr, [True])
    scopes[-1].write_back(assigned)
    return value, aux, [gradient if is_reached else None for gradient, is_reached in zip(gradients, reached)]
