"""PyTorch: exchanges values between the processes of a run."""

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from kerasdp.backends.torch.scatter import Scatter

if TYPE_CHECKING:
    import keras

T = TypeVar("T")


class ProcessGroup:
    """`kerasdp.backends.base.Processes` over torch's default process group, which has been joined.

    Args:
        rank: of this process.
        num_processes: of the group.
        device: of this process, on which tensors are sent.
        timeout: how long torch waits for the other ranks.
        local: see `Processes`.
    """

    def __init__(
        self, rank: int, num_processes: int, device: torch.device, timeout: timedelta, local: tuple[int, int] = (0, 1)
    ):
        self.local = local
        self.rank, self.num_processes, self.device, self.timeout = rank, num_processes, device, timeout
        self._host_group: Any = None
        self._scatter_group: Any = None
        self._num_scatters = 0
        # Of the call of `all_reduce_max_delayed` before this one: the tensor, and the work that fills it.
        self._last: tuple[torch.Tensor, Any] | None = None

    def all_gather_object(self, value: T) -> list[T]:
        """See `Processes`."""
        gathered: list[Any] = [None] * self.num_processes
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_from_rank0(self, values: list[float]) -> list[float]:
        """See `Processes`."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return tensor.tolist()

    def all_reduce_max_delayed(self, number: int) -> int:
        """See `Processes`."""
        tensor, last = torch.tensor(number), self._last
        self._last = tensor, dist.all_reduce(tensor, dist.ReduceOp.MAX, self._among_hosts(), async_op=True)
        if last is None:
            return 0
        last[1].wait()
        return int(last[0].item())

    def any_rank(self, flag: bool) -> bool:
        """See `Processes`."""
        tensor = torch.tensor(float(flag))
        dist.all_reduce(tensor, dist.ReduceOp.MAX, None if self.device.type == "cpu" else self._among_hosts())
        return bool(tensor.item())

    def _among_hosts(self) -> Any:
        """Returns a group whose messages wait for no GPU; NCCL's come after all that the GPU was given before."""
        if self._host_group is None:
            self._host_group = dist.new_group(backend="gloo", timeout=self.timeout)
        return self._host_group

    def open_scatter(self) -> Scatter:
        """See `Processes`."""
        if self._scatter_group is None:
            self._scatter_group = dist.new_group(backend="gloo")
        self._num_scatters += 1
        return Scatter(self._scatter_group, self._num_scatters)


def differing_variables(variables: list["keras.Variable"], group: dist.ProcessGroup | None = None) -> list[str]:
    """Returns the paths of variables that are not bit-equal on all ranks of a group (None: of the run)."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return []
    digests = [_digest(variable) for variable in variables]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, digests, group=group)
    return [variable.path for variable, *values in zip(variables, *gathered, strict=True) if len(set(values)) > 1]


def _digest(variable: "keras.Variable") -> bytes:
    array = np.ascontiguousarray(variable.value.detach().to("cpu", torch.float64).numpy())
    return hashlib.sha256(array.tobytes()).digest()
