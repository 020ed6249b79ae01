"""PyTorch: lets a user-defined step clip the gradients of the global batch, not those of a rank's rows."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from kerasdp.keras_compat.patches import wrapped


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` see means.

    `mean`: of gradients, over the ranks, where a step wants that.
    """

    def of_means(clip: Callable[..., Any]) -> Callable[..., Any]:
        def clip_means(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            weights = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            for weight, gradient in zip(weights, mean([weight.grad for weight in weights])):
                weight.grad = gradient
            return clip(weights, *args, **kwargs)

        return clip_means

    return wrapped(torch.nn.utils, clip_grad_norm_=of_means, clip_grad_value_=of_means)
