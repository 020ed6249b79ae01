"""PyTorch: gradients of steps that people write, and layers that are computed once more in the backward pass.

Loaded by the backend's name.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kerasdp.backends.torch.private import is_being_captured, tensors_let_go, version_of
from kerasdp.errors import RunError
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


def rematerialized(block: Any) -> Any:
    """Makes the call of a `kerasdp.scale.remat.Block`; returns the layer's outputs.

    Not by an `autograd.Function`: the gradients of tensors that the layer has from elsewhere would be lost.
    """
    if not torch.is_grad_enabled() or any(tensor.is_meta for tensor in block.tensors):
        return block.finish(block.run(block.tensors, []))
    is_captured = any(map(is_being_captured, block.tensors))
    upstream: dict[int, torch.Tensor] = {}
    versions: list[tuple[Any, torch.Tensor, int]] = []
    is_first = True

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal is_first
        if is_first:
            is_first = False
            return block.run([*tensors], [])
        for variable, value, version in versions:
            if version_of(value) != version:
                raise RunError(
                    f"--remat: {variable.path} was changed between the call of layer {block.layer.name} and its "
                    "gradient, for which the layer is computed again: leave that layer out"
                )
        values = block.begun
        if is_captured:
            tensors = tuple(_after(tensor, upstream) for tensor in tensors)
            values = [(one, value if value.is_floating_point() else _after(value, upstream)) for one, value in values]
        with tensors_let_go():
            return block.again([*tensors], values)

    # A captured step draws by no generator: `refuse_draws`.
    found = checkpoint(run, *block.tensors, use_reentrant=False, preserve_rng_state=not is_captured)
    versions += [(variable, value, version_of(value)) for variable, value in block.begun]
    for place, result in enumerate(found if is_captured else []):
        if result.requires_grad:
            result.register_hook(lambda gradient, place=place: upstream.update({place: gradient}))
    return block.finish(found)


def _after(tensor: torch.Tensor, upstream: dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns a tensor that is there once a gradient is; in a captured step, where operations may move."""
    gradient = next(iter(upstream.values()))
    return torch.ops.kerasdp.after(tensor.detach(), gradient).requires_grad_(tensor.requires_grad)


# Inductor (2.13) would compute both passes of a layer together, and keep what they have in common.
_operations = torch.library.Library("kerasdp", "FRAGMENT")
_operations.define("after(Tensor own, Tensor gradient) -> Tensor")
for _key in ("CPU", "CUDA", "Meta"):
    _operations.impl("after", lambda own, gradient: own.clone(), _key)
