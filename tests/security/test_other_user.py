"""Another user of a run's machine reads no file and no memory of it, and is let in at no socket."""

import contextlib
import json
import os
import socket
import sys

import pytest

from tests.helpers import BACKENDS, PROGRAMS, all_but
from tests.hosts import netns
from tests.security.listeners import listeners, shared_memory
from tests.security.runs import Run

# Root, to become another user; hosts, so that nothing is found but what is the run's.
pytestmark = pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS)
UID = 12345
FOLDER = PROGRAMS.parent / "security"


@contextlib.contextmanager
def program_of_another_user(host, name, **settings):
    """Runs one of this folder's programs within the context; yields what it prints, from JSON."""
    program = host.start(sys.executable, FOLDER / name, json.dumps({"uid": UID} | settings))
    try:
        line = program.stdout.readline()
        assert line, program.stderr.read()
        yield json.loads(line)
    finally:
        program.kill()
        program.communicate()


def meet(run, host):
    """Another user looks at all that a run has in the middle of its training."""
    pids = host.processes()
    sockets = [each.address for each in listeners(pids) if each.kind == "unix"]
    paths, memory = [str(path) for path in run.temporary.rglob("*")], shared_memory(pids)
    print(f"\nat {len(sockets)} Unix sockets, {len(paths)} paths, {len(memory)} in shared memory")
    with program_of_another_user(host, "other_user.py", paths=[*paths, *memory], sockets=sockets) as found:
        assert found == {"joined": [], "opened": []}


@all_but("jax", "tensorflow")
def test_on_one_machine_another_user_is_let_in_nowhere(backend):
    with netns.network(1) as hosts, Run(hosts[0], backend, num_devices=2, data="loader") as run:
        run.wait_for("middle", 2 if backend == "torch" else 1)
        meet(run, hosts[0])
        assert len(run.losses()) == 40


def test_what_another_user_could_do_is_found():
    """Where a folder and a socket are open to all, this is told."""
    with netns.network(1) as hosts, Run(hosts[0], BACKENDS[0]) as run:
        run.wait_for("middle", 1)
        path = str(run.temporary / "open")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            os.chmod(path, 0o777)  # noqa: S103
            (run.temporary / "folder").mkdir(0o755)
            paths = [str(run.temporary / "folder")]
            with program_of_another_user(hosts[0], "other_user.py", sockets=[path], paths=paths) as found:
                assert found == {"joined": [path], "opened": paths}
