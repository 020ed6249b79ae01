"""JAX: gradients of steps that people write.

Loaded by the backend's name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


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
    reached = _reached(jax.make_jaxpr(derivative)(*values).jaxpr)
    scopes[-1].write_back(assigned)
    return value, aux, [gradient if is_reached else None for gradient, is_reached in zip(gradients, reached)]


def _reached(jaxpr: Any, wanted: Sequence[bool] | None = None) -> list[bool]:
    """Returns on which of its arguments a program's results depend; `wanted`: which results, None: all."""
    wanted = wanted or [True] * len(jaxpr.outvars)
    needed = {id(variable) for variable, is_wanted in zip(jaxpr.outvars, wanted) if is_wanted}
    for equation in reversed(jaxpr.eqns):
        wanted = [id(variable) in needed for variable in equation.outvars]
        if not any(wanted):
            continue
        is_reached = [True] * len(equation.invars)
        if equation.primitive.name == "checkpoint":  # `jax.checkpoint`
            is_reached = _reached(equation.params["jaxpr"], wanted)
        needed |= {id(variable) for variable, reached in zip(equation.invars, is_reached, strict=True) if reached}
    return [id(variable) in needed for variable in jaxpr.invars]
