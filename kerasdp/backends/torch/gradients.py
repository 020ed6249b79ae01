"""PyTorch: gradients of steps that people write.

Loaded by the backend's name.
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
    """Computes a value, and takes its gradients: see `kerasdp.value_and_grad`.

    Args:
        compute: returns a scalar and what else there is, from tensors, or with variables that hold them.
        values: tensors by which the scalar is differentiated.
        variables: that hold them; empty where they are an argument.

    Returns:
        The scalar, what else there is, and the gradients: None for what the scalar does not depend on.
    """
    import keras

    from kerasdp.keras_compat.layers import InnerScope

    next(_calls)
    is_inner = current_step().differentiates  # then its gradients are differentiated in turn
    with torch.enable_grad():
        # A view of each argument: what the function reads of it in other ways does not count.
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
    if not is_inner:  # what holds no graph may be kept
        value, aux, assigned = keras.tree.map_structure(detached, (value, aux, assigned))
    scope.write_back(assigned)
    return value, aux, gradients


_calls = itertools.count()


def num_differentiated() -> int:
    """Returns a number that has grown by more than 1 since the last call if `differentiate` was called."""
    return next(_calls)


def detached(leaf: Any) -> Any:
    """Returns a tensor without what led to it; others as they are."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` see means.

    `mean`: of gradients, over the ranks, where a step wants that.
    """

    def of_means(clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for weight, gradient in zip(weights, mean([weight.grad for weight in weights])):
            weight.grad = gradient
        return clip(weights, *args, **kwargs)

    return wrapped(torch.nn.utils, clip_grad_norm_=of_means, clip_grad_value_=of_means)
