"""Computes the gradients of user-defined steps on torch.

`kerasdp.value_and_grad` imports the module `gradients` of the current backend.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch

from kerasdp.keras_compat.patches import current_step, step_with, wrapped


def differentiate(
    compute: Callable[[list[Any]], tuple[Any, Any]], values: list[Any], variables: list[Any]
) -> tuple[Any, Any, list[Any]]:
    """Computes a value and its gradients. Implements `kerasdp.value_and_grad`.

    Args:
        compute: a function that takes tensors, and returns a scalar and auxiliary results.
        values: the tensors for which gradients of the scalar are computed.
        variables: the variables that hold `values`, or an empty list if `compute` reads only its argument.

    Returns:
        The scalar, the auxiliary results, and one gradient for each tensor in `values`. A gradient is None if the
        scalar does not depend on the tensor.
    """
    import keras

    from kerasdp.keras_compat.layers import InnerScope

    next(_calls)
    is_inner = current_step().differentiates  # then its gradients are differentiated in turn
    with torch.enable_grad():
        # A view of each argument. If the function reads the original tensor elsewhere, that has no gradient.
        own = [value if variables else value.view_as(value) for value in values]
        own = [value if value.requires_grad else value.detach().requires_grad_() for value in own]
        others = [(variable, new) for variable, new, old in zip(variables, own, values) if new is not old]
        scope = InnerScope(others)
        with scope if others else contextlib.nullcontext(), step_with(differentiates=True):
            value, aux = compute(own)
        gradients: list[Any] = [None] * len(own)
        if value.requires_grad:
            gradients = [*torch.autograd.grad(value, own, create_graph=is_inner, allow_unused=True)]
    assigned = scope.assigned_values()
    if not is_inner:  # the caller may keep values that hold no graph
        value, aux, assigned = keras.tree.map_structure(detached, (value, aux, assigned))
    scope.write_back(assigned)
    return value, aux, gradients


_calls = itertools.count()


def num_differentiated() -> int:
    """Returns the value of a counter, and increases it by 1. `differentiate` also increases the counter by 1.

    If the results of two successive calls differ by more than 1, `differentiate` ran between these calls.
    """
    return next(_calls)


def detached(leaf: Any) -> Any:
    """Detaches a tensor from its gradient graph. Returns other objects unchanged."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which torch's functions that clip gradients first average the gradients over the ranks.

    These functions are `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.

    Args:
        mean: a function that averages gradients over the ranks, if the step needs this average.
    """

    def of_means(clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for weight, gradient in zip(weights, mean([weight.grad for weight in weights])):
            weight.grad = gradient
        return clip(weights, *args, **kwargs)

    return wrapped(torch.nn.utils, clip_grad_norm_=of_means, clip_grad_value_=of_means)
