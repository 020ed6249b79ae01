"""A host that is stopped, or whose cable is out, is noticed and named while large batches are handed out."""

import contextlib
import json
import os
import signal
import time

import pytest

from tests.helpers import HOST_BACKENDS, PROGRAMS, ROOT, finish, start
from tests.hosts import netns

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS),
]
SECONDS_TO_NOTICE, STEPS_BEFORE, LOST = 20, 3, 1


def start_on(host, folder, backend, num_hosts):
    fields = {"backend": backend, "hosts": str(num_hosts), "host_rank": host.number, "coordinator": "10.77.0.1:29500"}
    command = [PROGRAMS / "on_host.py", host.namespace, host.name, PROGRAMS / "large_batches.py", folder]
    secret = "of these three hosts"  # noqa: S105
    return start(*command, json.dumps(fields), backend=backend, PYTHONPATH=str(ROOT), KERASDP_SECRET=secret)


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
def test_the_right_host_is_named_soon(backend, fault, tmp_path):
    """102 MB a step, of which each of three hosts gets a third."""
    with netns.network(3) as hosts:
        programs = [start_on(host, tmp_path, backend, len(hosts)) for host in hosts]
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
        errors = [line for line in done[rank].stderr.splitlines() if line.startswith("error: ")]
        assert errors and f"process {LOST}" in errors[0] and hosts[LOST].address in errors[0], done[rank].stderr
        assert seconds[rank] < SECONDS_TO_NOTICE
