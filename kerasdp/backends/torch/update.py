"""Updates all weights on torch in one call, with the formulas of Keras' optimizers.

The update runs eagerly or in a graph. In a graph, the update is one node, which takes no time to capture or to compile.
As separate operations, the update would be two thirds of the graph of a GPT. It would then take more than half of
Inductor's time (torch 2.13).
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from kerasdp.backends.torch.private import foreach_mul, foreach_mul_, fused_adam_, fused_sgd_


@contextlib.contextmanager
def updating(optimizer: Any) -> Iterator[None]:
    """Returns a context in which a Keras optimizer updates weights without waiting for the device.

    A graph can contain this update. One wait remains in eager steps with `gradient_accumulation_steps`: the step reads
    from the device whether to update the weights.
    """
    import keras

    from kerasdp.keras_compat import optimizers

    # Nadam and Adadelta (Keras 3.15) read values on the host when they update all variables in one call. The kernel for
    # Adam on GPUs (torch 2.13) takes only a float32 rate.
    is_one_by_one = isinstance(optimizer, (keras.optimizers.Nadam, keras.optimizers.Adadelta)) or (
        keras.config.floatx() == "float64" and torch.cuda.is_available()
    )
    if is_one_by_one or optimizer is not optimizers.inner_optimizer(optimizer):
        # What decides on the device needs updates that leave the variables as they are.
        with optimizers.deciding_on_device(optimizer), optimizers.updating_one_by_one(optimizer):
            yield
    else:
        with optimizers.updating_at_once(optimizer, torch.ops.kerasdp.update_):
            yield


def _update(
    weights: list[torch.Tensor], gradients: list[torch.Tensor], momentums: list[torch.Tensor],
    velocities: list[torch.Tensor], rate: torch.Tensor, decay: torch.Tensor | None, decays: list[bool],
    numbers: list[float],
) -> None:  # fmt: skip
    """Updates weights of one dtype with torch's fused kernel for Adam or SGD.

    See `kerasdp.keras_compat.optimizers.updating_at_once` for the arguments.
    """
    if decay is not None and any(decays):
        foreach_mul_([weight for weight, is_decayed in zip(weights, decays) if is_decayed], decay)
    # The kernels go through the memory of a tensor from its first value to its last.
    lists = weights, momentums, velocities
    values, firsts, seconds = ([tensor.contiguous() for tensor in tensors] for tensors in lists)
    given = [gradient.to(value.dtype).contiguous() for gradient, value in zip(gradients, values)]
    if velocities:
        # PyTorch divides by `1 - beta ** step`, which is 1 here. Keras has these divisors in the rate, and so another
        # epsilon.
        at_infinity = [torch.full((), math.inf, dtype=torch.float32, device=rate.device)] * len(weights)
        rate = rate if rate.dtype == torch.float64 else rate.float()
        beta_1, beta_2, epsilon = numbers
        fused_adam_(
            values, given, firsts, seconds, [], at_infinity, lr=rate, beta1=beta_1, beta2=beta_2, weight_decay=0.0,
            eps=epsilon, amsgrad=False, maximize=False,
        )  # fmt: skip
    else:
        # PyTorch applies the rate when it updates a weight, Keras when it updates a momentum.
        momentum, nesterov = numbers
        fused_sgd_(
            values, list(foreach_mul(given, -rate)), firsts, weight_decay=0.0, momentum=momentum, lr=-1.0,
            dampening=0.0, nesterov=bool(nesterov), maximize=False, is_first_step=False,
        )  # fmt: skip
    for tensor, copy in zip((*weights, *momentums, *velocities), (*values, *firsts, *seconds)):
        if copy is not tensor:
            tensor.copy_(copy)


_operations = torch.library.Library("kerasdp", "FRAGMENT")
_operations.define(
    "update_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momentums, Tensor(c!)[] velocities, Tensor rate, "
    "Tensor? decay, bool[] decays, float[] numbers) -> ()"
)
_operations.impl("update_", _update, "CompositeExplicitAutograd")
_operations.impl("update_", lambda *_: None, "Meta")
