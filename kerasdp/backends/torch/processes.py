"""PyTorch: what the ranks of a run exchange beside tensors: objects, flags, and batches that one of them reads."""

import datetime
import hmac
import itertools
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from kerasdp.errors import UserError, WorkerError
from kerasdp.processes import error_text
from kerasdp.processes.ranks import ALIKE

T = TypeVar("T")

# A rank may wait at the end of the training function for as long as another one works there.
_AS_LONG_AS_IT_TAKES = datetime.timedelta(days=365)
# What ranks exchange: all of them the same at a time.
_OBJECT, _FLAG, _LATER = range(3)
# Of a message's tag, which has 31 bits, so many are of its number on its scatter.
_BITS_OF_NUMBERS = 20


class GlooProcesses:
    """`kerasdp.processes.ranks.Processes` over a group of Gloo's, also where the gradients go by NCCL.

    Its messages never wait for the messages of a step. All ranks make it together, once the process group is there.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Makes the group.

        Args:
            key: only the ranks of this run know it. None: the network is trusted.

        Raises:
            WorkerError: if a program that does not know the key has connected to this rank.
        """
        self.rank, self.num_processes = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_IT_TAKES)
        if key is not None:
            self._check_peers(key)
        self._last: Callable[[], int] | None = None
        self._scatter_numbers = itertools.count()

    def all_gather_object(self, value: T) -> list[T]:
        """See `Processes`."""
        self._begin_maximum(_OBJECT, 0)()
        found: list[Any] = [None] * self.num_processes
        dist.all_gather_object(found, value, group=self._group)
        return found

    def all_reduce_max_delayed(self, number: int) -> int:
        """See `Processes`."""
        last, self._last = self._last, self._begin_maximum(_LATER, number)
        return 0 if last is None else last()

    def any_rank(self, flag: bool) -> bool:
        """See `Processes`."""
        return self._begin_maximum(_FLAG, flag)() > 0

    def open_scatter(self) -> "GlooScatter":
        """See `Processes`."""
        return GlooScatter(self._group, self.rank, self.num_processes, next(self._scatter_numbers))

    def _check_peers(self, key: bytes) -> None:
        """Raises `WorkerError` unless a rank of this run is at the other end of each connection of the group.

        Gloo (torch 2.13) accepts any program that connects to its port, and what comes over the group is unpickled.
        """
        proofs = [
            torch.frombuffer(bytearray(hmac.digest(key, b"%d" % rank, "sha256")), dtype=torch.uint8)
            for rank in range(self.num_processes)
        ]
        received = [torch.empty_like(proof) for proof in proofs]
        others = [rank for rank in range(self.num_processes) if rank != self.rank]
        works = [dist.isend(proofs[self.rank], group=self._group, group_dst=rank) for rank in others]
        works += [dist.irecv(received[rank], group=self._group, group_src=rank) for rank in others]
        for work in works:  # before this may raise: Gloo takes back what is sent but not waited for
            if work is not None:
                work.wait()
        for rank in others:
            if not torch.equal(received[rank], proofs[rank]):
                raise WorkerError(f"another program has connected to rank {self.rank}, in the place of rank {rank}")

    def _begin_maximum(self, kind: int, number: int) -> Callable[[], int]:
        """Begins an exchange; returns a function that waits for the maximum of the ranks' numbers.

        Ranks that begin exchanges of different kinds see it: their maximum is not their minimum.
        """
        tensor = torch.tensor([number, kind, -kind], device="cpu")
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> int:
            work.wait()
            largest, *kinds = tensor.tolist()
            if sum(kinds):
                place = error_text.calling_line() or "its end"
                raise UserError(
                    f"the ranks do different things: rank {self.rank}, at {place}, and another one wait for each other "
                    f"in different calls: {ALIKE}"
                )
            return int(largest)

        return wait


class GlooScatter:
    """`kerasdp.processes.ranks.Scatter` over a group of Gloo's: messages of any threads, each with its own tag."""

    def __init__(self, group: Any, rank: int, num_processes: int, channel: int):
        self.rank, self.num_processes = rank, num_processes
        self._group, self._channel = group, channel % 2 ** (31 - _BITS_OF_NUMBERS)

    def __call__(self, values: list[Any], number: int) -> Any:
        """See `kerasdp.processes.ranks.Scatter`."""
        tag = self._channel << _BITS_OF_NUMBERS | number % 2**_BITS_OF_NUMBERS
        if self.rank:
            length = torch.empty(1, dtype=torch.int64, device="cpu")
            dist.recv(length, group=self._group, group_src=0, tag=tag)
            content = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            dist.recv(content, group=self._group, group_src=0, tag=tag)
            return pickle.loads(content.numpy().data)
        sent: list[tuple[Any, torch.Tensor]] = []
        for rank in range(1, self.num_processes):
            content = torch.from_numpy(np.frombuffer(pickle.dumps(values[rank], protocol=5), np.uint8))
            for message in (torch.tensor([len(content)], device="cpu"), content):
                sent.append((dist.isend(message, group=self._group, group_dst=rank, tag=tag), message))
        for work, _ in sent:  # whose memory is there until then
            work.wait()
        return values[0]
