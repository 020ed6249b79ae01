"""Says which variables several devices hold in parts, along which axis each is cut, and what that spares: one rule."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Numbers below which a variable stays whole: to send so few takes longer than to hold them.
SMALLEST = 2**11


def cut_axis(shape: Sequence[int], num_parts: int) -> int | None:
    """Returns the axis along which a variable is cut: the largest one that divides, of several equal ones the last.

    Args:
        shape: of the variable.
        num_parts: devices that hold one part each.

    Returns:
        The axis; None if the variable stays whole.
    """
    if math.prod(shape) < SMALLEST or num_parts == 1:
        return None
    axes = [axis for axis, size in enumerate(shape) if size % num_parts == 0]
    return max(axes, key=lambda axis: (shape[axis], axis), default=None)


def part_of(whole: Any, axis: int, number: int, num_parts: int) -> Any:
    """Returns one of the parts of a tensor along an axis, which their number divides."""
    length = whole.shape[axis] // num_parts
    return whole[(slice(None),) * axis + (slice(number * length, (number + 1) * length),)]


def part_shape(shape: Sequence[int], axis: int, num_parts: int) -> tuple[int, ...]:
    """Returns the shape of each of the parts along an axis of a tensor."""
    return tuple(size // num_parts if place == axis else size for place, size in enumerate(shape))


def bytes_of(variables: Iterable[Any], num_parts: int = 1) -> int:
    """Returns the bytes of variables on a device, of which so many hold one part each of those that are cut."""
    return sum(
        math.prod(variable.shape)
        * bytes_of_number(variable.dtype)
        // (1 if cut_axis(variable.shape, num_parts) is None else num_parts)
        for variable in variables
    )


def bytes_of_number(dtype: Any) -> int:
    """Returns the bytes of a number of a type."""
    bits = re.search(r"\d+$", str(getattr(dtype, "name", dtype)))
    return int(bits[0]) // 8 if bits else 1
