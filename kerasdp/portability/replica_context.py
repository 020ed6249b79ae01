"""Tells a layer which replica it runs in, and which rows of the global batch that holds. Set around each step."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    """Which replica a forward pass belongs to, and which rows of the global batch it sees.

    Args:
        num_replicas: how many replicas work on the global batch.
        num_rows: rows of this replica's input that are real, the rest is padding at the end; a number or a scalar
            tensor. None where a layer sees the whole global batch at once, without padding (jax).
        rows: rows of this replica's input, padding included; None on jax.
        first_row: index of this replica's first row in the global batch.
        gather: stacks the same tensor of all replicas along a new first axis; differentiable: the gradient of a
            replica's tensor is the sum of its gradients on all replicas. None on jax.
        gather_rows: the rows of all replicas, padding removed: a tensor of the global batch. None on jax.
        everywhere: gives all devices the whole of a tensor of which each has a shard; on jax only.
        penalties: losses of the global batch that layers found on the way, to be added to the model's loss.
        moving: what batch norms with statistics of each replica leave to be summed over the replicas once the pass
            is over: the layer, and a tensor for its `move_together`. None: they gather it at once.
    """

    num_replicas: int
    num_rows: Any = None
    rows: int | None = None
    first_row: int = 0
    gather: Callable[[Any], Any] | None = None
    gather_rows: Callable[[Any], Any] | None = None
    everywhere: Callable[[Any], Any] | None = None
    penalties: list[Any] = dataclasses.field(default_factory=list)
    moving: list[tuple[Any, Any]] | None = None

    @classmethod
    def of_shard(
        cls, num_rows: int, rank: int, num_replicas: int, size: int, *, first_row: int = 0,
        gather: Callable[[Any], Any] | None, gather_rows: Callable[[Any], Any],
        moving: list[tuple[Any, Any]] | None = None,
    ) -> "ReplicaContext":  # fmt: skip
        """Returns the context of one replica's shard of a batch, padded to the size of the other shards.

        Args:
            num_rows: of the batch.
            rank: of the replica.
            num_replicas: among which the batch is split.
            size: rows of each shard, padding included.
            first_row: index of the batch's first row in the global batch, where it is a micro-batch of that.
            gather: see `ReplicaContext`.
            gather_rows: see `ReplicaContext`.
            moving: see `ReplicaContext`.
        """
        own = rank * size
        return cls(
            num_replicas=num_replicas,
            num_rows=min(max(num_rows - own, 0), size),
            rows=size,
            first_row=first_row + own,
            gather=gather,
            gather_rows=gather_rows,
            moving=moving,
        )

    @classmethod
    def of_micro_batch(
        cls, first_row: Any, num_rows: int, *, num_replicas: int = 1, gather: Callable[[Any], Any] | None = None
    ) -> "ReplicaContext":
        """Returns the context of a whole micro-batch, without padding, that one program computes.

        Args:
            first_row: index of its first row in the global batch; may be a scalar tensor.
            num_rows: of the micro-batch.
            num_replicas: devices of the program.
            gather: see `ReplicaContext`.
        """
        return cls(
            num_replicas=num_replicas,
            num_rows=num_rows,
            rows=num_rows,
            first_row=first_row,
            gather=gather,
            gather_rows=lambda rows: rows,
        )


# A context variable, not a global: TensorFlow traces each replica in a thread of its own.
_current: contextvars.ContextVar[ReplicaContext | None] = contextvars.ContextVar("kerasdp_replica", default=None)


def current() -> ReplicaContext | None:
    """Returns the context of the running step; None outside of one, or with a single replica."""
    return _current.get()


@contextlib.contextmanager
def use(context: ReplicaContext | None) -> Iterator[ReplicaContext | None]:
    """Makes `context` the current one within a `with` block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
