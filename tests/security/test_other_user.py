"""Another user of a run's machine reads nothing of it, joins it nowhere, and has nothing unpickled."""

import contextlib
import json
import os
import pathlib
import socket
import sys
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, all_but, finish
from tests.hosts import netns
from tests.security.listeners import listeners, shared_memory
from tests.security.runs import ON_ONE_MACHINE, SECRET, Run

# Root, to become another user; hosts, so that nothing is found but what is the run's.
pytestmark = pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS)
UID = 12345
KINDS = ["pickles", "claims", "garbage", "silence", "mirror"]
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


def listens_locally(pids):
    """Where another user of the machine reaches a run: ports, and Unix sockets."""
    found = listeners(pids)
    ports = [
        ("127.0.0.1", each.port) for each in found if each.kind == "tcp" and (each.is_loopback or each.is_wildcard)
    ]
    ports += [(each.address, each.port) for each in found if each.kind == "tcp" and not each.is_wildcard]
    return sorted(set(ports)), [each.address for each in found if each.kind == "unix"]


def meet(run, host):
    """Another user looks at a run in the middle of its training, and knocks everywhere; it learns what it learns."""
    places, sockets = listens_locally(host.processes())
    paths = [str(path) for path in run.temporary.rglob("*")]
    memory = shared_memory(host.processes())
    print(f"\nat {len(places)} ports, {len(sockets)} Unix sockets, {len(paths)} paths, {len(memory)} in shared memory")
    settings = {"kinds": KINDS, "places": places, "sockets": sockets, "marker": str(marker_of(run))}
    with program_of_another_user(host, "other_user.py", paths=[*paths, *memory], **settings) as found:
        time.sleep(3)
        losses = run.results()[0]
    assert found == {"joined": [], "opened": [], "connected": bool(places)}
    assert not marker_of(run).exists(), "another user's code was run"
    return losses


def marker_of(run):
    """In a folder where both may write."""
    return run.temporary / "marker"


@all_but("jax", "tensorflow")
def test_on_one_machine_another_user_is_let_in_nowhere(backend):
    with netns.network(1) as hosts, Run(hosts, backend, num_devices=2, data=ON_ONE_MACHINE[backend]) as run:
        run.start(0)
        run.wait_for("middle", 2 if backend == "torch" else 1)
        assert len(meet(run, hosts[0])) == 40


def test_what_another_user_could_do_is_found():
    """Where a folder and a socket are open to all, this is told."""
    with netns.network(1) as hosts, Run(hosts, BACKENDS[0]) as run:
        path = str(run.temporary / "open")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            os.chmod(path, 0o777)  # noqa: S103
            (run.temporary / "folder").mkdir(0o755)
            paths = [str(run.temporary / "folder")]
            settings = {"kinds": [], "places": [], "sockets": [path], "marker": "", "paths": paths}
            with program_of_another_user(hosts[0], "other_user.py", **settings) as found:
                assert found == {"joined": [path], "opened": paths, "connected": False}


def of_mpirun(rank):
    """What mpirun sets, for two processes on this machine."""
    names = {"SIZE": 2, "RANK": rank, "LOCAL_SIZE": 2, "LOCAL_RANK": rank}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in names.items()} | {"PMIX_NAMESPACE": "job7"}


def start_by_mpirun(run, rank):
    settings = dict(run.settings)
    del settings["num_devices"]
    return run.start_as(rank, run.hosts[0], settings, **of_mpirun(rank))


@pytest.mark.proof
def test_processes_that_mpirun_starts_meet_nobody_else(backend):
    """Without KERASDP_SECRET: another user knocks before process 1 comes, and in the middle of the training."""
    with netns.network(1) as hosts, Run(hosts, backend) as run:
        start_by_mpirun(run, 0)
        end = time.monotonic() + 60
        while not any(listens_locally(hosts[0].processes())) and time.monotonic() < end:
            time.sleep(0.05)
        places, sockets = listens_locally(hosts[0].processes())
        assert places or sockets, "nobody waits for process 1"
        # Not those who are silent, behind whom these would have to wait.
        settings = {"kinds": ["pickles", "claims"], "places": places, "sockets": sockets, "marker": str(marker_of(run))}
        paths = [str(path) for path in run.temporary.rglob("*")]
        with program_of_another_user(hosts[0], "other_user.py", paths=paths, **settings) as found:
            assert found == {"joined": [], "opened": [], "connected": bool(places)}
            time.sleep(1)
            start_by_mpirun(run, 1)
            run.wait_for("middle", 2)
        assert not marker_of(run).exists(), "another user's code was run"
        assert len(meet(run, hosts[0])) == 40


@pytest.mark.proof
def test_another_user_cannot_take_the_meeting_place_before(backend):
    """Of a job whose number he knows: he was where its processes met the last time."""
    with netns.network(1) as hosts, Run(hosts, backend) as run:
        start_by_mpirun(run, 0)
        places, sockets = (), ()
        end = time.monotonic() + 60
        while not (places or sockets) and time.monotonic() < end:
            places, sockets = listens_locally(hosts[0].processes())
            time.sleep(0.05)
        start_by_mpirun(run, 1)
        run.wait_for("middle", 2)
        expected = run.results()[0]
        root, (folder, temporary) = str(run.temporary), (run.folder, run.temporary)
        for path in [*temporary.iterdir(), *folder.glob("*-*"), folder / "continue"]:
            path.unlink() if path.is_file() else os.rmdir(path)
        settings = {"ports": sorted({port for _, port in places}), "marker": str(marker_of(run))}
        own = [path for path in sockets if path.startswith((root, "@"))]
        with program_of_another_user(hosts[0], "impostor.py", sockets=own, **settings) as num_places:
            print(f"\n{backend}: the other user is at {num_places} places: {settings['ports']}, {own}")
            start_by_mpirun(run, 0)
            start_by_mpirun(run, 1)
            (run.folder / "continue").touch()
            done = [finish(run.programs[rank], 60) for rank in (0, 1)]
        assert not marker_of(run).exists(), "another user's code was run"
        for each in done:  # it meets elsewhere, or says that it cannot
            assert each.returncode in (0, 2) and "Traceback" not in each.stderr, each.stderr
        if done[0].returncode == 0:
            assert json.loads(done[0].stdout.partition("RESULT ")[2]) == expected


@all_but("torch", "tensorflow")
def test_no_command_line_holds_the_secret(backend):
    """Command lines are for all users to read."""
    with netns.network(2) as hosts, Run(hosts, backend, variables={"KERASDP_SECRET": SECRET}) as run:
        for number in (0, 1):
            run.start(number)
        run.wait_for("middle", 2)
        pids = [pid for host in hosts for pid in host.processes()]
        assert pids
        for pid in pids:
            assert SECRET.encode() not in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        run.results()
