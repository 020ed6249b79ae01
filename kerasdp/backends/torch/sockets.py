"""Exchanges small messages between the processes of a run through sockets.

Gloo (torch 2.13) hands each message to a thread of its own. Where processes share cores that thread waits for its turn:
beside a computation, gathering 144 bytes costs 1.1 ms among two processes on two cores and 4 ms among four; with
sockets that the computing thread itself reads, 0.04 and 0.6 ms.
"""

import collections
import os
import shutil
import socket
import struct
import tempfile

import numpy as np
import torch

from kerasdp.runtime.door import Door
from kerasdp.runtime.door import connect as connect_to
from kerasdp.runtime.link import Link

# Sockets are told to hold as much, so that all may send before they read.
_MOST_BYTES = 2**16
_SECONDS_TO_COME = 120.0
# Of a message: its tag, and the bytes after it.
_HEAD = struct.Struct("<qq")


class _Sockets:
    """Holds a connection to each other process of the run. Made by all of them together."""

    def __init__(self, link: Link) -> None:
        self.rank, self.size = link.rank, link.num_processes
        folders = [tempfile.mkdtemp(prefix="kerasdp-") if self.rank == 0 else ""]  # that this user alone can enter
        (folder,) = link.all_gather_object(folders)[0]
        self.others: dict[int, socket.socket] = {}
        # By rank: what was read and is not a whole message yet. By rank and tag: messages that were not asked for yet.
        self.unread: dict[int, bytearray] = collections.defaultdict(bytearray)
        self.arrived: dict[tuple[int, int], collections.deque[bytes]] = collections.defaultdict(collections.deque)
        with Door(os.path.join(folder, str(self.rank)) if link.own is None else (link.own, 0)) as door:
            places = link.all_gather_object(door.place)
            for rank in range(self.rank):
                self.others[rank] = connect_to(places[rank], {"rank": self.rank})
            while len(self.others) < self.size - 1:
                if (come := door.next(_SECONDS_TO_COME)) is None:
                    raise ConnectionError("the other ranks have not come")
                connection, words = come
                self.others[words["rank"]] = connection
        for connection in self.others.values():
            connection.settimeout(None)
            if link.own is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # on macOS it would be 8 KiB
                connection.setsockopt(socket.SOL_SOCKET, buffer, 2 * _MOST_BYTES)
        link.all_gather_object(None)
        if self.rank == 0:
            shutil.rmtree(folder)

    def send(self, own: np.ndarray, tag: int) -> None:
        """Sends bytes to all others, for their `receive` of that tag."""
        message = _HEAD.pack(tag, own.size) + own.tobytes()
        for connection in self.others.values():
            connection.sendall(message)

    def receive(self, own: np.ndarray, tag: int) -> np.ndarray:
        """Returns the bytes of all ranks, in rows. `own`: equally many on each rank."""
        gathered = np.empty((self.size, own.size), np.uint8)
        gathered[self.rank] = own
        for rank in self.others:
            gathered[rank] = np.frombuffer(self._message(rank, tag), np.uint8)
        return gathered

    def _message(self, rank: int, tag: int) -> bytes:
        """Waits for the next message of a tag; keeps those of others: ranks may compile steps in another order."""
        while not self.arrived[rank, tag]:
            size, found = self._peek(rank)
            self.arrived[rank, found].append(self._take(rank, size))
        return self.arrived[rank, tag].popleft()

    def _peek(self, rank: int) -> tuple[int, int]:
        """Waits for a whole message; returns its size and tag."""
        bytes_of = self.unread[rank]
        while True:
            if len(bytes_of) >= _HEAD.size:
                tag, size = _HEAD.unpack_from(bytes_of)
                if len(bytes_of) >= _HEAD.size + size:
                    return size, tag
            part = self.others[rank].recv(_MOST_BYTES)
            if not part:
                raise ConnectionError(f"rank {rank} has left")
            bytes_of += part

    def _take(self, rank: int, size: int) -> bytes:
        end = _HEAD.size + size
        message = bytes(self.unread[rank][_HEAD.size : end])
        del self.unread[rank][:end]
        return message


_sockets: _Sockets | None = None


def connect(link: Link) -> None:
    """Connects the processes of a run. Called by each of them."""
    global _sockets
    _sockets = _Sockets(link)


def takes(tensor: torch.Tensor) -> bool:
    """Returns whether `gather` may be called: the same on all ranks."""
    return _sockets is not None and tensor.device.type == "cpu" and 0 < tensor.nbytes <= _MOST_BYTES


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Stacks the tensor of all ranks along a new first axis. Not differentiable.

    In a graph that is being captured these are two operations, `kerasdp::send` and `kerasdp::receive`: what lies
    between them is computed while the messages travel.
    """
    own = torch.ops.kerasdp.send(tensor.detach().contiguous(), 0)
    return torch.ops.kerasdp.receive(own, 0, _connected().size)


def _connected() -> _Sockets:
    if _sockets is None:
        raise RuntimeError("sockets.gather: expected a call of sockets.connect before it. Received: none")
    return _sockets


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _send(own: torch.Tensor, tag: int) -> torch.Tensor:
    _connected().send(_bytes_of(own), tag)
    return own.clone()  # an operation that gives an argument back is refused


def _receive(own: torch.Tensor, tag: int, size: int) -> torch.Tensor:
    return torch.from_numpy(_connected().receive(_bytes_of(own), tag)).view(own.dtype).reshape(size, *own.shape)


# The messages of a tag are received in the order in which they were sent. Not by `torch.library.custom_op`, each call
# of which takes as long (torch 2.13) as sending and receiving.
_operations = torch.library.Library("kerasdp", "DEF")
_operations.define("send(Tensor own, int tag) -> Tensor")
_operations.define("receive(Tensor own, int tag, int size) -> Tensor")
_operations.impl("send", _send, "CPU")
_operations.impl("receive", _receive, "CPU")
_operations.impl("send", lambda own, tag: torch.empty_like(own), "Meta")
_operations.impl("receive", lambda own, tag, size: own.new_empty((size, *own.shape)), "Meta")
