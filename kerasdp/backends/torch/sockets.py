"""Exchanges small messages between the processes of one host through sockets.

Gloo (torch 2.13) hands each message to a thread of its own. Where processes share cores that thread waits for its turn:
beside a computation, gathering 144 bytes costs 1.1 ms among two processes on two cores and 4 ms among four; with
sockets that the computing thread itself reads, 0.04 and 0.6 ms.
"""

import os
import shutil
import socket
import tempfile

import numpy as np
import torch
import torch.distributed as dist

# Sockets are told to hold as much, so that all may send before they read.
_MOST_BYTES = 2**16


class _Sockets:
    """Holds a connection to each other process of the run. Made by all of them together."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        folders = [tempfile.mkdtemp(prefix="kerasdp-") if self.rank == 0 else ""]  # readable by this user only
        dist.broadcast_object_list(folders)
        paths = [os.path.join(folders[0], str(rank)) for rank in range(self.size)]
        self.others: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(paths[self.rank])
            door.listen(self.size)
            dist.barrier()
            for rank in range(self.rank):
                self.others[rank] = socket.socket(socket.AF_UNIX)
                self.others[rank].connect(paths[rank])
                self.others[rank].sendall(self.rank.to_bytes(4, "little"))
            for _ in range(self.rank + 1, self.size):
                connection, _ = door.accept()
                self.others[int.from_bytes(connection.recv(4), "little")] = connection
        for connection in self.others.values():
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # on macOS it would be 8 KiB
                connection.setsockopt(socket.SOL_SOCKET, buffer, 2 * _MOST_BYTES)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folders[0])

    def gather(self, own: np.ndarray) -> np.ndarray:
        """Returns the bytes of all ranks, in rows. `own`: equally many on each rank."""
        gathered = np.empty((self.size, own.size), np.uint8)
        gathered[self.rank] = own
        for connection in self.others.values():
            connection.sendall(own.data)
        for rank, connection in self.others.items():
            missing = memoryview(gathered[rank])
            while missing:
                count = connection.recv_into(missing)
                if count == 0:
                    raise ConnectionError(f"rank {rank} has left")
                missing = missing[count:]
        return gathered


_sockets: _Sockets | None = None


def connect() -> None:
    """Connects the processes of a run, all of which are on this host. Called by each of them."""
    global _sockets
    if hasattr(socket, "AF_UNIX"):
        _sockets = _Sockets()


def takes(tensor: torch.Tensor) -> bool:
    """Returns whether `gather` may be called: the same on all ranks."""
    return _sockets is not None and tensor.device.type == "cpu" and 0 < tensor.nbytes <= _MOST_BYTES


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Stacks the tensor of all ranks along a new first axis. Not differentiable; can be captured in a graph."""
    return _gather(tensor.contiguous(), _connected().size)


def _connected() -> _Sockets:
    if _sockets is None:
        raise RuntimeError("sockets.gather: expected a call of sockets.connect before it. Received: none")
    return _sockets


@torch.library.custom_op("kerasdp::gather", mutates_args=())
def _gather(tensor: torch.Tensor, size: int) -> torch.Tensor:
    own = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(_connected().gather(own)).view(tensor.dtype).reshape(size, *tensor.shape)


@_gather.register_fake
def _(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor.new_empty((size, *tensor.shape))
