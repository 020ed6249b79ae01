"""Starts one program in several processes, each a machine of its own as far as it knows, on this one."""

import json
import socket
import subprocess
import sys

from tests.helpers import PROGRAMS, ROOT, environment

PROGRAM = PROGRAMS / "hosts.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(number, program=PROGRAM, variables=(), **settings):
    """One process of the program for each host."""
    settings = {"hosts": str(number), "coordinator": f"127.0.0.1:{free_port()}", "num_devices": 2} | settings
    return [
        subprocess.Popen(
            [sys.executable, str(program), json.dumps(settings | {"host_rank": rank})],
            cwd=ROOT, env=environment(PYTHONPATH=str(ROOT), **dict(variables)),
            text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(number)
    ]  # fmt: skip


def results_of(processes, timeout=200):
    """What each printed behind RESULT."""
    done = [(process, *process.communicate(timeout=timeout)) for process in processes]
    for process, stdout, stderr in done:
        assert process.returncode == 0, stdout + stderr
    lines = [[line for line in stdout.splitlines() if line.startswith("RESULT ")] for _, stdout, _ in done]
    return [json.loads(found[0].removeprefix("RESULT ")) if found else None for found in lines]


def alone(**settings):
    """What one process with one device finds."""
    return results_of([
        subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps({"num_devices": 1} | settings)],
            cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
    ])[0]  # fmt: skip
