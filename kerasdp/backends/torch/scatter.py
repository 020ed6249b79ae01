"""PyTorch: hands out what one process reads, such as batches, to all processes of a run."""

import collections
import pickle
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Numbers of one scatter that can be told apart at the same time.
_NUMBERS = 1024
# Bytes of the first message of a value. Most values fit, so that there is no other: gloo (torch 2.13) lets a message be
# received in more memory than it has bytes, so its size need not be sent before it.
_FIRST = 2**20
# Bytes to which an array in it is aligned.
_ALIGNED = 64
# Calls of which rank 0 does not know whether the others have received the messages.
_MOST_UNDER_WAY = 4


class Scatter:
    """`kerasdp.runtime.ranks.Scatter` over gloo, which on one host sends some 5 GB a second.

    Args:
        group: of all processes, with gloo; messages of several scatters may be under way in it.
        channel: number of this scatter, the same in each process.
    """

    def __init__(self, group: dist.ProcessGroup, channel: int):
        self.rank, self.num_processes = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._first_tag = group, channel * _NUMBERS
        self._under_way: collections.deque[list[Any]] = collections.deque()
        self._lock = threading.Lock()

    def __call__(self, values: list[Any], number: int, *, wait: bool = True) -> Any:
        """See `kerasdp.runtime.ranks.Scatter`."""
        tag = self._first_tag + number % _NUMBERS
        if self.rank:
            return self._received(tag)
        messages: list[torch.Tensor] = []
        works = []
        for rank in range(1, self.num_processes):
            if rank == 1 or values[rank] is not values[rank - 1]:
                messages = _messages(values[rank])
                # Arrays that are not copied may be filled anew by what they were read from.
                wait = wait or len(messages) > 1
            works += [dist.isend(message, rank, self._group, tag) for message in messages]
        self._under_way.append(works)
        self.finish(0 if wait else _MOST_UNDER_WAY)
        return values[0]

    def finish(self, most_under_way: int = 0) -> None:
        """See `kerasdp.runtime.ranks.Scatter`."""
        with self._lock:
            while len(self._under_way) > most_under_way:
                for work in self._under_way.popleft():
                    work.wait()

    def _received(self, tag: int) -> Any:
        first = self._receive(_FIRST, tag)
        size = int.from_bytes(first[:8], "little")
        index = first[8:size] if size <= _FIRST else bytes(first[8:]) + self._receive(size - _FIRST, tag)
        pickled, lengths = pickle.loads(index)
        places, end = _places(size, lengths)
        if end <= _FIRST:
            return pickle.loads(pickled, buffers=[first[place] for place in places])
        return pickle.loads(pickled, buffers=[self._receive(length, tag) for length in lengths])

    def _receive(self, size: int, tag: int) -> memoryview:
        buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.recv(buffer, 0, self._group, tag)
        return buffer.numpy().data


def _messages(value: Any) -> list[torch.Tensor]:
    """Returns what is sent: the value and copies of its arrays, or, if that is too much for one, each by itself.

    A message begins with the number of bytes before the arrays; then come the value without them, and their lengths.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    index = pickle.dumps((pickled, [array.size for array in arrays]))
    head = np.frombuffer((8 + len(index)).to_bytes(8, "little") + index, np.uint8)
    places, end = _places(head.size, [array.size for array in arrays])
    if end > _FIRST:
        parts = [head[:_FIRST], head[_FIRST:], *arrays]  # PyTorch takes none that may not be written to
        return [torch.from_numpy(np.require(part, requirements="W")) for part in parts if part.size]
    message = torch.empty(end, dtype=torch.uint8)
    for place, array in zip([slice(head.size), *places], [head, *arrays], strict=True):
        message.numpy()[place] = array
    return [message]


def _places(size: int, lengths: list[int]) -> tuple[list[slice], int]:
    """Returns where arrays are in a message, after so many bytes, and its end."""
    places = []
    for length in lengths:
        first = -(-size // _ALIGNED) * _ALIGNED
        size = first + length
        places.append(slice(first, size))
    return places, size
