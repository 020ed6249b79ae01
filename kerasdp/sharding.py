"""Defines which variables are sharded over devices, along which axis, and how many bytes each device then stores."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Variables with fewer values are not sharded: sending them takes longer than the saved memory is worth.
SMALLEST = 2**11


def cut_axis(shape: Sequence[int], num_parts: int) -> int | None:
    """Returns the axis along which a variable is sharded: the largest axis whose size is divisible by `num_parts`.

    If several axes have this size, the result is the last of these axes.

    Args:
        shape: shape of the variable.
        num_parts: number of devices. Each device has one shard.

    Returns:
        The axis; None if the variable is not sharded.
    """
    if math.prod(shape) < SMALLEST or num_parts == 1:
        return None
    axes = [axis for axis, size in enumerate(shape) if size % num_parts == 0]
    return max(axes, key=lambda axis: (shape[axis], axis), default=None)


def part_of(whole: Any, axis: int, number: int, num_parts: int) -> Any:
    """Returns shard `number` of a tensor along an axis. The size of the axis must be divisible by `num_parts`."""
    length = whole.shape[axis] // num_parts
    return whole[(slice(None),) * axis + (slice(number * length, (number + 1) * length),)]


def part_shape(shape: Sequence[int], axis: int, num_parts: int) -> tuple[int, ...]:
    """Returns the shape of one shard of a tensor that is split along `axis` into `num_parts` shards."""
    return tuple(size // num_parts if place == axis else size for place, size in enumerate(shape))


def bytes_of(variables: Iterable[Any], num_parts: int = 1) -> int:
    """Returns how many bytes variables need on each device if they are sharded over `num_parts` devices."""

    def held(each: Any) -> int:
        num_shards = 1 if cut_axis(each.shape, num_parts) is None else num_parts
        return math.prod(each.shape) * _bytes_of_number(each.dtype) // num_shards

    return sum(map(held, variables))


def bytes_of_row(tensors: Iterable[Any]) -> int:
    """Returns how many bytes one sample needs in all given tensors together. An axis of unknown size counts as 1."""
    return sum(math.prod(size or 1 for size in each.shape[1:]) * _bytes_of_number(each.dtype) for each in tensors)


def _bytes_of_number(dtype: Any) -> int:
    """Returns the number of bytes of one value of a dtype."""
    bits = re.search(r"\d+$", str(getattr(dtype, "name", dtype)))
    return int(bits[0]) // 8 if bits else 1
