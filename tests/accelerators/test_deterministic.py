"""`--deterministic` changes no number on the CPU, where runs are bit-equal without it, and refuses operations."""

import pytest

from tests.helpers import PROGRAMS, result_of, run

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("count", [1, 2])
def test_the_losses_are_the_same(backend, count):
    found = result_of(run(PROGRAMS / "deterministic.py", backend, count))
    assert len(found["True"]) == 10
    assert found["True"] == found["False"]


def test_what_has_no_deterministic_algorithm_is_refused():
    found = result_of(run(PROGRAMS / "deterministic.py", "torch", 1, "refused"))
    assert len(found["False"]) == 10
    assert found["True"] == (
        "deterministic: put_ does not have a deterministic implementation; do without that operation, or leave "
        "deterministic=True out"
    )
