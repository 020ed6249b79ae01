"""Starts one program in several processes, each a machine of its own as far as it knows, on this one."""

import json
import socket
import subprocess
import sys

from tests.helpers import PROGRAMS, ROOT, environment, finish, result_of, run, start

PROGRAM = PROGRAMS / "hosts.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(number, program=PROGRAM, variables=(), warm=None, **settings):
    """One process of the program for each host; with a backend that is there already, if each is one rank."""
    settings = {"hosts": str(number), "coordinator": f"127.0.0.1:{free_port()}", "num_devices": 2} | settings
    texts = [json.dumps(settings | {"host_rank": rank}) for rank in range(number)]
    if warm is not None:
        return [start(program, text, backend=warm, **dict(variables)) for text in texts]
    return [
        subprocess.Popen(
            [sys.executable, str(program), text],
            cwd=ROOT, env=environment(PYTHONPATH=str(ROOT), **dict(variables)),
            text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for text in texts
    ]  # fmt: skip


def results_of(processes, timeout=200):
    """What each printed behind RESULT."""
    done = [finish(process, timeout) for process in processes]
    for each in done:
        assert each.returncode == 0, each.stdout + each.stderr
    lines = [[line for line in each.stdout.splitlines() if line.startswith("RESULT ")] for each in done]
    return [json.loads(found[0].removeprefix("RESULT ")) if found else None for found in lines]


def alone(**settings):
    """What one process with one device finds."""
    return result_of(run(PROGRAM, json.dumps({"num_devices": 1} | settings), backend=settings["backend"]))
