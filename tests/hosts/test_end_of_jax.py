"""Processes of JAX that end at different times all end in order."""

import concurrent.futures
import socket

import pytest

from tests.helpers import BACKENDS, PROGRAMS, run

pytestmark = pytest.mark.skipif("jax" not in BACKENDS, reason="needs jax")


def test_a_process_that_ends_later_than_process_0_ends_in_order():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"

    def process(number):
        return run(PROGRAMS / "end_of_jax.py", number, coordinator, backend="jax", timeout=60)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(process, range(2)))
    assert [done.returncode for done in ended] == [0, 0], [done.stderr[-2000:] for done in ended]
