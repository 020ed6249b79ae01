"""Memory that a step frees stays with the process, and goes back to the system when the run has ended."""

import ctypes
import sys

import pytest

from tests.accelerators.driver import make_driver
from tests.helpers import PROGRAMS, result_of, run

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc")
HUGE = 40  # pages of 100 MB, if they have 2 MiB each; else 24,000
NUM_BYTES = 100 * 10**6


@pytest.mark.short("torch-100000000")
@pytest.mark.parametrize(("backend", "size"), [("torch", NUM_BYTES), ("jax", 10**6), ("tensorflow", 10**6)])
def test_what_is_freed_stays_until_the_end(backend, size):
    found = result_of(run(PROGRAMS / "freed_memory.py", backend, size))
    assert found["within"] < HUGE < found["before"] and found["after"] > HUGE
    assert found["held"] > NUM_BYTES * 0.9 and found["left"] < NUM_BYTES * 0.1
    assert (found["arenas"] == 0) == (backend != "tensorflow")


def test_threads_that_compile_for_a_gpu_have_memory_of_their_own(tmp_path):
    driver = make_driver(tmp_path, 1)
    found = result_of(run(PROGRAMS / "freed_memory.py", "jax", 10**6, LD_LIBRARY_PATH=driver))
    assert found["within"] < HUGE and found["arenas"] > 1


# Of tensorflow and jax a block so large goes back.
@pytest.mark.proof
@pytest.mark.parametrize(("backend", "environment"), [("tensorflow", {}), ("torch", {"MALLOC_ARENA_MAX": "4"})])
def test_not_where_it_does_not_help_or_the_user_has_chosen(backend, environment):
    found = result_of(run(PROGRAMS / "freed_memory.py", backend, NUM_BYTES, **environment))
    assert found["within"] > HUGE and found["held"] < NUM_BYTES * 0.1
