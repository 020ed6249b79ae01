"""Which axis of a variable is cut."""

import pytest

from kerasdp.sharding import SMALLEST, cut_axis


@pytest.mark.parametrize(
    ("shape", "num_parts", "axis"),
    [
        ((64, 48), 2, 0),
        ((48, 64), 2, 1),
        ((64, 64), 2, 1),
        ((3, 3, 32, 64), 4, 3),
        ((3, 3, 64, 32), 4, 2),
        ((65, 48), 2, 1),
        ((65, 49), 2, None),
        ((SMALLEST,), 2, 0),
        ((SMALLEST - 2,), 2, None),
        ((4096, 4096), 1, None),
        ((), 2, None),
    ],
)
def test_the_largest_axis_that_divides_is_cut(shape, num_parts, axis):
    assert cut_axis(shape, num_parts) == axis
