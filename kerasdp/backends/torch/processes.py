"""Exchanges objects, flags and batches between the ranks of a PyTorch run."""

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
# Kinds of exchange. All ranks must make the same kind at a time.
_OBJECT, _FLAG, _LATER = range(3)
# A message's tag has 31 bits. This many bits hold the number of the message in its scatter.
_BITS_OF_NUMBERS = 20


class GlooProcesses:
    """Implements `kerasdp.processes.ranks.Processes` with a Gloo group, even if gradients are sent with NCCL.

    Messages of this group never wait for messages of a training step. All ranks create this object together, after they
    have created the process group of the run.
    """

    def __init__(self, key: bytes | None = None) -> None:
        """Creates the Gloo group.

        Args:
            key: a secret that only the ranks of this run know, or None if the network is trusted.

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
        """Returns the value of each rank, in the order of the ranks."""
        self._begin_maximum(_OBJECT, 0)()
        found: list[Any] = [None] * self.num_processes
        dist.all_gather_object(found, value, group=self._group)
        return found

    def all_reduce_max_delayed(self, number: int) -> int:
        """Returns the maximum of the numbers that the ranks passed to the previous call. The first call returns 0.

        The previous call has started the all-reduce of these numbers. So no rank waits for another rank.
        """
        last, self._last = self._last, self._begin_maximum(_LATER, number)
        return 0 if last is None else last()

    def any_rank(self, flag: bool) -> bool:
        """Returns whether `flag` is True on at least one rank."""
        return self._begin_maximum(_FLAG, flag)() > 0

    def open_scatter(self) -> "GlooScatter":
        """Returns a new scatter. Its messages never mix with the messages of another scatter."""
        return GlooScatter(self._group, self.rank, self.num_processes, next(self._scatter_numbers))

    def _check_peers(self, key: bytes) -> None:
        """Raises `WorkerError` unless each connection of this rank leads to a rank of this run.

        Gloo (torch 2.13) accepts any program that connects to its port. The group unpickles the messages that it
        receives.
        """
        proofs = [
            torch.frombuffer(bytearray(hmac.digest(key, b"%d" % rank, "sha256")), dtype=torch.uint8)
            for rank in range(self.num_processes)
        ]
        received = [torch.empty_like(proof) for proof in proofs]
        others = [rank for rank in range(self.num_processes) if rank != self.rank]
        works = [dist.isend(proofs[self.rank], group=self._group, group_dst=rank) for rank in others]
        works += [dist.irecv(received[rank], group=self._group, group_src=rank) for rank in others]
        for work in works:  # before this may raise: Gloo cancels messages that are not waited for
            if work is not None:
                work.wait()
        for rank in others:
            if not torch.equal(received[rank], proofs[rank]):
                raise WorkerError(f"another program has connected to rank {self.rank} as rank {rank}; end that program")

    def _begin_maximum(self, kind: int, number: int) -> Callable[[], int]:
        """Starts to compute the maximum of a number over the ranks. Returns a function that waits for the maximum.

        The ranks also compare the kinds of their exchanges. If the kinds differ, the returned function raises
        `UserError`.

        Args:
            kind: the kind of the exchange: `_OBJECT`, `_FLAG` or `_LATER`.
            number: the number of this rank.
        """
        tensor = torch.tensor([number, kind, -kind], device="cpu")
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def wait() -> int:
            work.wait()
            largest, *kinds = tensor.tolist()
            if sum(kinds):
                place = error_text.calling_line() or "the end of the training function"
                raise UserError(
                    f"the ranks do different things: rank {self.rank} waits at {place}, and another rank waits in a "
                    f"different call: {ALIKE}"
                )
            return int(largest)

        return wait


class GlooScatter:
    """Implements `kerasdp.processes.ranks.Scatter` with a Gloo group.

    Any thread may call this object, because each message has a separate tag.
    """

    def __init__(self, group: Any, rank: int, num_processes: int, channel: int):
        self.rank, self.num_processes = rank, num_processes
        self._group, self._channel = group, channel % 2 ** (31 - _BITS_OF_NUMBERS)

    def __call__(self, values: list[Any], number: int) -> Any:
        """Sends one value from rank 0 to each rank. Returns the value for this rank. See `Scatter`."""
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
        for work, _ in sent:  # `sent` keeps the memory of the messages until then
            work.wait()
        return values[0]
