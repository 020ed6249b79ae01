"""Says which variables several devices hold in parts, and along which axis each is cut: one rule for all backends."""

import math
from collections.abc import Sequence

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
