"""What processes of several machines exchange beside tensors: over Gloo, and over the store of JAX's coordinator."""

import pytest

from tests.helpers import HOST_BACKENDS, PROGRAMS, finish, start
from tests.hosts.together import free_port, place_in_run


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_each_gets_what_the_others_gave(backend):
    port = free_port()
    places = [place_in_run(backend, rank, 2, port) for rank in range(2)]
    programs = [start(PROGRAMS / "exchanges.py", backend, backend=backend, **place) for place in places]
    for program in programs:
        done = finish(program, 200)
        assert done.returncode == 0 and done.stdout.endswith("exchanged\n"), done.stdout + done.stderr
