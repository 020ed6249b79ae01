"""Gathers and sums PyTorch tensors over ranks, with the gradients that training on one global batch needs.

Small CPU tensors are sent through sockets. All other tensors are sent with `torch.distributed`.
"""

import os
import socket
import tempfile
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from kerasdp.backends.torch.private import all_gather_functional, all_reduce_async, is_being_captured, wait
from kerasdp.processes.ranks import Processes


def all_gather_stacked(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Gathers one tensor from each rank of a group, and stacks the tensors along a new first axis."""
    if group is None and fits_sockets(tensor):
        return gather_by_sockets(tensor)
    return gather_by_group(tensor, group)


def gather_by_group(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Gathers one tensor from each rank with NCCL or Gloo, and stacks the tensors along a new first axis.

    The function never uses sockets. In a captured step, graph passes can find this gather.
    """
    tensor = tensor.contiguous()
    if is_being_captured(tensor):  # a step is being captured: the functional form
        rows = tensor if tensor.dim() else tensor.reshape(1)
        return all_gather_functional(rows, group).reshape(dist.get_world_size(group), *tensor.shape)
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    if dist.get_backend(group) == "nccl":
        dist.all_gather_single(gathered.flatten(0, 1) if tensor.dim() else gathered, tensor, group=group)
        return gathered
    gathered[dist.get_rank(group)] = tensor
    # Gloo (torch 2.13) takes up to twice as long to gather, since it copies what comes.
    sending = [dist.broadcast(one, group=group, group_src=rank, async_op=True) for rank, one in enumerate(gathered)]
    for work in sending:
        work.wait()
    return gathered


def sum_over_ranks(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
    """Sums each tensor over the ranks of a group, with one all-reduce per dtype.

    The sums of sparse tensors are dense.
    """
    sums: list[torch.Tensor] = [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors]
    for dtype in dict.fromkeys(tensor.dtype for tensor in sums):
        places = [place for place, tensor in enumerate(sums) if tensor.dtype == dtype]
        flat = torch.cat([sums[place].detach().reshape(-1) for place in places])
        flat = wait(all_reduce_async(flat, group))
        for place, part in zip(places, flat.split([sums[place].numel() for place in places])):
            sums[place] = part.reshape(sums[place].shape)
    return sums


def gather_rows(rows: torch.Tensor, group: Any = None, factor: float | None = None) -> torch.Tensor:
    """Gathers the rows of all ranks of a group into one tensor. The function is differentiable.

    Args:
        rows: this rank's rows. Each rank has the same number of rows.
        group: the process group, or None for all ranks.
        factor: the factor by which the gradient of `rows` is multiplied. None means the number of ranks, which is right
            for gradients that are averaged over the ranks.
    """
    return _GatherRows.apply(rows, group, dist.get_world_size(group) if factor is None else factor)


def gather_statistics(statistics: torch.Tensor, group: Any = None, weight: float = 1.0) -> torch.Tensor:
    """Gathers one tensor from each rank, and stacks the tensors along a new first axis.

    The function is differentiable. The gradient of a rank's tensor is the sum of the gradients that all ranks compute
    for this tensor.

    Args:
        statistics: this rank's tensor.
        group: the process group, or None for all ranks.
        weight: this rank's weight in the average of the gradients over the ranks. The mean of all weights is 1.
    """
    return _GatherStatistics.apply(statistics, group, weight)


def sum_gradients(gradient: torch.Tensor, gather: Any, weight: float) -> torch.Tensor:
    """Gathers the gradients of all ranks, and stacks the gradients along a new first axis.

    Each gradient is multiplied by the weight of its rank, and divided by the weight of this rank. The division cancels
    this rank's weight in a later weighted average over the ranks.

    Args:
        gradient: this rank's gradient of a value that all ranks share.
        gather: a function that gathers a tensor of each rank, and stacks these tensors.
        weight: this rank's weight in the average. A rank without rows has weight 0, and its gradients are not used.
    """
    if weight == 1.0:
        return gather(gradient)
    gathered = gather(gradient * weight if weight else torch.zeros_like(gradient))
    return gathered / weight if weight else torch.zeros_like(gathered)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any, factor: float) -> torch.Tensor:
        ctx.first, ctx.num_rows, ctx.factor = dist.get_rank(group) * len(rows), len(rows), factor
        return all_gather_stacked(rows, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.factor * gradient[ctx.first : ctx.first + ctx.num_rows], None, None


class _GatherStatistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, statistics: torch.Tensor, group: Any, weight: float) -> torch.Tensor:
        ctx.group, ctx.weight = group, weight
        return all_gather_stacked(statistics, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gathered = sum_gradients(gradient, lambda own: all_gather_stacked(own, ctx.group), ctx.weight)
        return gathered[:, dist.get_rank(ctx.group)].sum(0), None, None


# The buffers of sockets hold this many bytes, so that all ranks can send before they read.
_MOST_BYTES = 2**16


class _Sockets:
    """Holds one socket connection to each other process of a run on one machine.

    All processes create this object together. Gloo (torch 2.13) passes each message to a separate thread. If processes
    share cores, this thread waits for a free core. Gathering 144 bytes during a computation then takes 1.1 ms with two
    processes on two cores, and 4 ms with four processes. With sockets, the computing thread reads the messages itself.
    The gather then takes 0.04 ms with two processes, and 0.6 ms with four processes.
    """

    def __init__(self, processes: Processes) -> None:
        self.rank, self.size = processes.rank, processes.num_processes
        self.others: dict[int, Connection] = {}
        # The path of a Unix socket has 107 letters at most; nobody else may enter the folder.
        with (
            tempfile.TemporaryDirectory(prefix="kerasdp-", dir="/tmp") as folder,
            Listener(os.path.join(folder, "socket"), "AF_UNIX", backlog=self.size) as listener,
        ):
            addresses = processes.all_gather_object(listener.address)
            for rank in range(self.rank):
                self.others[rank] = Client(addresses[rank])
                self.others[rank].send(self.rank)
            while len(self.others) < self.size - 1:
                connection = listener.accept()
                self.others[connection.recv()] = connection
        for connection in self.others.values():
            with socket.socket(fileno=os.dup(connection.fileno())) as one:
                for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # on macOS it would be 8 KiB
                    one.setsockopt(socket.SOL_SOCKET, buffer, 2 * _MOST_BYTES)
        processes.all_gather_object(None)  # all are connected, with room for messages

    def gather(self, own: np.ndarray, tag: int) -> np.ndarray:
        """Gathers the bytes of all ranks into an array with one row per rank.

        Args:
            own: the bytes of this rank. Each rank sends the same number of bytes.
            tag: a number that identifies this gather. All ranks pass the same number.

        Raises:
            ConnectionError: if another rank has closed its connection.
            RuntimeError: if another rank passes a different tag.
        """
        message = tag.to_bytes(8) + own.tobytes()
        for connection in self.others.values():
            connection.send_bytes(message)
        gathered = np.empty((self.size, own.size), np.uint8)
        gathered[self.rank] = own
        for rank, connection in self.others.items():
            try:
                received = connection.recv_bytes()
            except EOFError:
                raise ConnectionError(f"rank {rank} has ended; read the reason in the output of that rank") from None
            if received[:8] != message[:8]:
                raise RuntimeError(f"ranks {rank} and {self.rank} compiled different steps; use --compile=off")
            gathered[rank] = np.frombuffer(received, np.uint8, offset=8)
        return gathered


_sockets: _Sockets | None = None


def connect_sockets(processes: Processes) -> None:
    """Connects the processes of a run on one machine with sockets. Each process must call this function."""
    global _sockets
    _sockets = _Sockets(processes)


def fits_sockets(tensor: torch.Tensor) -> bool:
    """Returns whether `gather_by_sockets` can gather this tensor. The result is the same on all ranks."""
    return _sockets is not None and tensor.device.type == "cpu" and 0 < tensor.nbytes <= _MOST_BYTES


def gather_by_sockets(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers one CPU tensor from each rank through sockets, and stacks the tensors along a new first axis.

    The function is not differentiable. `fits_sockets` must have returned True for the tensor.
    """
    return torch.ops.kerasdp.gather(tensor.detach().contiguous(), 0, cast(_Sockets, _sockets).size)


def _gather(own: torch.Tensor, tag: int, size: int) -> torch.Tensor:
    gathered = cast(_Sockets, _sockets).gather(own.reshape(-1).view(torch.uint8).numpy(), tag)
    return torch.from_numpy(gathered).view(own.dtype).reshape(size, *own.shape)


# Not by `torch.library.custom_op`, each call of which takes as long (torch 2.13) as sending and receiving.
_operations = torch.library.Library("kerasdp", "DEF")
_operations.define("gather(Tensor own, int tag, int size) -> Tensor")
_operations.impl("gather", _gather, "CPU")
_operations.impl("gather", lambda own, tag, size: own.new_empty((size, *own.shape)), "Meta")
