"""PyTorch: lets the host run ahead of a GPU: numbers travel both ways without a wait for what the GPU was given."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kerasdp.backends.torch.private import foreach_add_of_tensors
from kerasdp.keras_compat.patches import replaced

# Bytes of an array up to which it is sent from pinned memory, which PyTorch (2.13) keeps once it was used.
_SMALL = 2**16


class HostCopy:
    """A number on its way from a GPU to the host.

    To read it is to wait for the step that computed it; `.item()` waits for all that the GPU was given since.
    """

    def __init__(self, value: torch.Tensor):
        """Sends it, once what the GPU was given so far is done."""
        self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._value.copy_(value.detach(), non_blocking=True)
        self._is_sent = torch.cuda.Event()
        self._is_sent.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        self._is_sent.synchronize()
        return float(self._value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(float(self), dtype)

    def is_ready(self) -> bool:
        """Returns whether the GPU has computed it."""
        return self._is_sent.query()


def to_host(value: Any) -> Any:
    """Returns a number that can be read later without a wait for what follows: on a GPU a `HostCopy`.

    Args:
        value: a tensor of one number; what is not on a GPU (None, a Python number) is returned as it is.
    """
    return HostCopy(value) if isinstance(value, torch.Tensor) and value.is_cuda else value


def numbers_made_on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which a GPU fills in the numbers that Python gives to an eager step; elsewhere no change.

    Keras (3.15) makes a tensor of each Python number by `torch.as_tensor`, a step of a small net 30 of them. For that
    PyTorch (2.13) copies the number from the host, and waits until the GPU has it, and so all that was given before.
    For other threads, as those that read data, nothing changes. Unneeded once Keras fills numbers in.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    original, own_thread = torch.as_tensor, threading.get_ident()

    def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        is_sent = device is not None and torch.device(device).type == "cuda" and not isinstance(data, torch.Tensor)
        if not is_sent or threading.get_ident() != own_thread:
            return original(data, dtype=dtype, device=device)
        if type(data) in (bool, int, float):
            return torch.full((), data, dtype=dtype, device=device)
        on_host = original(data, dtype=dtype)
        if on_host.nbytes > _SMALL:
            return on_host.to(device)
        return on_host.pin_memory().to(device, non_blocking=True)

    return replaced(torch, as_tensor=as_tensor)


@contextlib.contextmanager
def updating_on(device: torch.device, optimizer: Any) -> Iterator[None]:
    """Lets an optimizer of Keras update the weights of an eager step on a GPU without a wait; elsewhere as it does.

    What cannot be helped: `gradient_accumulation_steps` asks in each step whether it is time to update.
    """
    if device.type != "cuda":
        yield
        return
    import keras

    from kerasdp.keras_compat.optimizers import deciding_on_device, inner_optimizer, updating_one_by_one

    with contextlib.ExitStack() as stack:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            stack.enter_context(deciding_on_device(optimizer))
        if optimizer is not inner_optimizer(optimizer) or isinstance(optimizer, keras.optimizers.Nadam):
            # Nadam's (3.15) way to update all variables in one call reads two numbers; that of `deciding_on_device`
            # needs updates that leave the variables as they are.
            stack.enter_context(updating_one_by_one(optimizer))
        else:
            stack.enter_context(foreach_add_of_tensors())
        yield
