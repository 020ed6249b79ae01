"""A host that is stopped, or whose cable is out, ends the others while large batches are handed out."""

import contextlib
import json
import os
import signal
import time

import pytest

from tests.helpers import HOST_BACKENDS, PROGRAMS, ROOT, finish, start
from tests.hosts import netns
from tests.hosts.test_hosts import PORT
from tests.hosts.together import place_in_run

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS),
]
SECONDS_TO_NOTICE, STEPS_BEFORE, LOST = {"torch": 40, "jax": 30}, 3, 1


def start_on(host, hosts, folder, backend):
    command = [PROGRAMS / "on_host.py", host.namespace, host.name, PROGRAMS / "large_batches.py", folder]
    place = place_in_run(backend, host.number, len(hosts), PORT, hosts[0].address)
    fields = json.dumps({"backend": backend, "hang_timeout": 20})
    return start(*command, fields, backend=backend, PYTHONPATH=str(ROOT), **place)


def step_of(folder, rank):
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"step-{rank}").read_text())
    return -1


def wait_for_steps(folder, programs):
    end = time.monotonic() + 180
    while min(step_of(folder, rank) for rank in range(len(programs))) < STEPS_BEFORE:
        assert time.monotonic() < end, [step_of(folder, rank) for rank in range(len(programs))]
        ended = [program.poll() for program in programs]
        assert ended == [None] * len(programs), [finish(program, 1) for program in programs if program.poll()]
        time.sleep(0.05)


@pytest.mark.parametrize("fault", ["stopped", "cable out"])
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_the_others_end_soon(backend, fault, tmp_path):
    """102 MB a step, of which each of three hosts gets a third."""
    with netns.network(3) as hosts:
        programs = [start_on(host, hosts, tmp_path, backend) for host in hosts]
        try:
            wait_for_steps(tmp_path, programs)
            begin, seconds = time.monotonic(), {}
            if fault == "stopped":
                os.kill(programs[LOST].pid, signal.SIGSTOP)
            else:
                hosts[LOST].set_cable(False)
            others = [rank for rank in range(len(hosts)) if rank != LOST]
            while len(seconds) < len(others) and time.monotonic() - begin < 60:
                for rank in others:
                    if rank not in seconds and programs[rank].poll() is not None:
                        seconds[rank] = time.monotonic() - begin
                time.sleep(0.05)
        finally:
            for program in programs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(program.pid, signal.SIGKILL)
        done = {rank: finish(programs[rank], 20) for rank in others}
        finish(programs[LOST], 20)
    print(f"\n{backend}, {fault}: noticed after", {rank: f"{each:.1f} s" for rank, each in seconds.items()})
    for rank in others:
        assert rank in seconds, f"process {rank} still runs after 60 s"
        assert done[rank].returncode, done[rank].stderr
        print("    " + (done[rank].stderr.strip().splitlines() or ["nothing is said"])[0][:200])
        assert seconds[rank] < SECONDS_TO_NOTICE[backend]
