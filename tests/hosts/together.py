"""Starts one program in several processes, each a machine of its own as far as it knows, on this one."""

import json
import socket

from tests.helpers import PROGRAMS, ROOT, finish, result_of, run, start

PROGRAM = PROGRAMS / "hosts.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place_in_run(backend, rank, number, port, address="127.0.0.1"):
    """The environment variables of one of so many processes: torch's, which torchrun sets, or JAX's."""
    if backend == "jax":
        return {
            "JAX_COORDINATOR_ADDRESS": f"{address}:{port}",
            "JAX_NUM_PROCESSES": str(number),
            "JAX_PROCESS_ID": str(rank),
        }
    numbers = {"RANK": rank, "WORLD_SIZE": number, "LOCAL_RANK": 0, "MASTER_ADDR": address, "MASTER_PORT": port}
    return {name: str(value) for name, value in numbers.items()}


def started(number, program=PROGRAM, variables=(), warm=None, **settings):
    """One process of the program for each host; with a backend that is there already, if each is one rank."""
    port, text = free_port(), json.dumps(settings)
    places = [dict(variables) | place_in_run(settings["backend"], rank, number, port) for rank in range(number)]
    return [start(program, text, backend=warm, PYTHONPATH=str(ROOT), **place) for place in places]


def results_of(processes, timeout=200):
    """What each host printed behind RESULT: of its processes the one with rank 0 has more to say than null."""
    done = [finish(process, timeout) for process in processes]
    for each in done:
        assert each.returncode == 0, each.stdout + each.stderr
    found = [[line[7:] for line in each.stdout.splitlines() if line.startswith("RESULT ")] for each in done]
    return [next(filter(None, map(json.loads, lines)), None) for lines in found]


def alone(**settings):
    """What one process with one device finds."""
    return result_of(run(PROGRAM, json.dumps({"num_devices": 1} | settings), backend=settings["backend"]))
