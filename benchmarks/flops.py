"""Counts the arithmetic operations of a model's layers."""

from typing import Any

import numpy as np

from kerasdp.scale.pipeline import Graph


def flops_of(model: Any) -> list[float]:
    """Returns the operations of each call of a layer in a sample's forward pass.

    Two for each weight and position of the output; one for each number of an output without weights.

    Args:
        model: functional, built.
    """
    return [float(_flops(call)) for call in Graph(model).calls]


def _flops(call: Any) -> int:
    kernels = [weight for weight in getattr(call.operation, "weights", []) if len(weight.shape) > 1]
    shape = [size or 1 for size in call.outputs[0].shape[1:]]
    if not kernels:
        return int(np.prod(shape))
    # Channels come last, or, where the layer says so, first.
    first = getattr(call.operation, "data_format", None) == "channels_first"
    positions = int(np.prod(shape[1:] if first else shape[:-1]))
    return 2 * positions * sum(int(np.prod(kernel.shape)) for kernel in kernels)
