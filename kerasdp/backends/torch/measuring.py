"""PyTorch: measures on a GPU what the layers of a pipeline cost, while the weights are in host memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from kerasdp.pipeline.partition import HERE, MeasuringDevice


def measuring_on(device: torch.device) -> MeasuringDevice:
    """Returns what measures on a device, which holds the weights of one layer at a time: all may be too many."""
    if device.type == "cpu":
        return HERE

    @contextlib.contextmanager
    def holding(operation: Any) -> Iterator[None]:
        import keras

        values = [variable.value for variable in getattr(operation, "variables", [])]
        kept = [value.data for value in values]
        for value in values:
            value.data = value.data.to(device)
        try:
            with torch.no_grad(), keras.device(str(device)):  # without what a backward pass would need
                yield
        finally:
            for value, data in zip(values, kept):
                value.data = data

    def wait(_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return MeasuringDevice(holding=holding, wait=wait)
