"""PyTorch: lets a user-defined step clip the gradients of the global batch, not those of a rank's rows."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Lets `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` see means, until it is left.

    `mean`: of gradients, over the ranks, where a step wants that.
    """
    names = ("clip_grad_norm_", "clip_grad_value_")
    kept = [getattr(torch.nn.utils, name) for name in names]

    def of_means(clip: Callable[..., Any]) -> Callable[..., Any]:
        def clip_means(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            for weight, gradient in zip(weights, mean([weight.grad for weight in weights])):
                weight.grad = gradient
            return clip(weights, *args, **kwargs)

        return clip_means

    for name, clip in zip(names, kept):
        setattr(torch.nn.utils, name, of_means(clip))
    try:
        yield
    finally:
        for name, clip in zip(names, kept):
            setattr(torch.nn.utils, name, clip)
