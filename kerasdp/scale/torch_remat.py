"""Recomputes a layer in the backward pass on PyTorch: see `kerasdp.scale.remat`."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kerasdp.backends.torch.private import is_being_captured, tensors_let_go, version_of
from kerasdp.errors import RunError


def rematerialized(block: Any) -> Any:
    """Calls the layer of `block`, so that the backward pass recomputes the layer. Returns the layer's outputs.

    Does not use an `autograd.Function`, which would lose the gradients of tensors that the layer closes over. `block`
    is a `kerasdp.scale.remat.Block`.
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
                    f"--remat: {variable.path} changed after the call of layer {block.layer.name} and before the "
                    "backward pass, which recomputes the layer; remove that layer from --remat"
                )
        values = block.begun
        if is_captured:
            tensors = tuple(_after(tensor, upstream) for tensor in tensors)
            values = [(one, value if value.is_floating_point() else _after(value, upstream)) for one, value in values]
        with tensors_let_go():
            return block.again([*tensors], values)

    # A captured step uses no random generator: see `refuse_draws`.
    found = checkpoint(run, *block.tensors, use_reentrant=False, preserve_rng_state=not is_captured)
    versions += [(variable, value, version_of(value)) for variable, value in block.begun]
    for place, result in enumerate(found if is_captured else []):
        if result.requires_grad:
            result.register_hook(lambda gradient, place=place: upstream.update({place: gradient}))
    return block.finish(found)


def _after(tensor: torch.Tensor, upstream: dict[int, torch.Tensor]) -> torch.Tensor:
    """Returns a copy of a tensor that a graph computes only after a gradient in `upstream`.

    The compiler may reorder the operations of a captured step. This copy keeps the recomputation of a layer in the
    backward pass. `upstream` contains gradients of the layer's outputs.
    """
    gradient = next(iter(upstream.values()))
    return torch.ops.kerasdp.after(tensor.detach(), gradient).requires_grad_(tensor.requires_grad)


# Without this operation, Inductor (2.13) would compute both passes of a layer together, and keep their common results.
_operations = torch.library.Library("kerasdp", "FRAGMENT")
_operations.define("after(Tensor own, Tensor gradient) -> Tensor")
for _key in ("CPU", "CUDA", "Meta"):
    _operations.impl("after", lambda own, gradient: own.clone(), _key)
