"""Faults at random: a rank that raises, sleeps, exits or is killed, anywhere. The run ends, and nothing is left."""

import os
import re
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, killed_at_the_end, left_after, start

HANG_TIMEOUT = 5
NUM_FAULTS = 50
# What is said; where no process is told apart from a rank, and where a process waits for others.
SAID = {
    "raise": r"RuntimeError: the fault",
    "sleep": r"is at \S*faults.py:\d+, in __call__.*: no progress for 5 s",
    "exit 0": r"(rank \d|the worker) ended with exit code 0, but without a result",
    "exit 3": r"(rank \d|the worker) ended with exit code 3",
    "kill": r"(rank \d|the worker) was ended by SIGKILL; check whether the system has enough memory",
}


# In short: a rank that raises, and one that is killed, while the other one waits for it.
@pytest.mark.short("2-torch", "37-torch")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("seed", range(NUM_FAULTS))
def test_a_fault_ends_the_run(seed, name, tmp_path):
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    program = start(PROGRAMS / "faults.py", name, 2, seed, HANG_TIMEOUT, backend=name, TMPDIR=str(tmp_path))
    with killed_at_the_end(program):
        done = program.finish(100)
        end = time.time()
        _, kind, place, times, rank = re.search("FAULT.*", done.stdout)[0].split("; ")
        seconds = end - float(re.search(r"BEGIN (\S+)", done.stdout)[1])
        text = done.stderr.strip().splitlines()[-1]
        print(f"{name}: rank {rank}: {kind} {place} {times}: {seconds:.1f} s: {text}")
        assert done.returncode == 1, done.stderr
        of_rank = rf"rank {rank} " if name == "torch" and kind == "sleep" else ""  # the line names all ranks
        assert len(re.findall(of_rank + SAID[kind], done.stderr)) == 1, done.stderr
        assert kind == "sleep" or "Connection" not in done.stderr, done.stderr
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 or kind in ("raise", "sleep"), done.stderr
        if name == "torch" and kind not in ("raise", "sleep"):
            assert f"rank {rank} " in text.partition(", rank")[0]
        assert seconds < (HANG_TIMEOUT if kind == "sleep" else 0) + 8
        assert left_after(program.pid, 0.2) == []
        assert os.listdir(tmp_path) == []
        left = set(os.listdir("/dev/shm")) - shared if shared else set()
        assert not [file for file in left if file.startswith(("torch_", "kerasdp"))]
