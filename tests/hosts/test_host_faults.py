"""Processes of runs on several machines that are killed, and started again and again."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import HOST_BACKENDS, ROOT, environment
from tests.hosts.together import free_port

pytestmark = [pytest.mark.proof, pytest.mark.timeout(2 * 3600)]
EPOCHS = 6


def start(backend, workdir, *flags):
    """Two hosts of two devices that train lenet on digits, or what the flags say."""
    port = free_port()
    command = [
        sys.executable, "recipes/train.py", f"--backend={backend}", "--gpus=2", "--device=cpu", "--hosts=2",
        f"--coordinator=127.0.0.1:{port}", f"--workdir={workdir}", "--log_every=1", "--batch_size=61", "--model=lenet",
        *flags,
    ]  # fmt: skip
    # In sessions of their own, to kill one with all that it has started.
    return [
        subprocess.Popen(
            [*command, f"--host_rank={rank}"], cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip


def ends(processes, timeout=300):
    """The exit code and the output of each."""
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def lines_of(workdir):
    steps = [json.loads(line) for line in (workdir / "steps.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in steps}


def workers(process):
    """The processes that train, of those that one has started: all that have the link, which listens or connects."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if os.getsid(int(entry.name)) == process.pid and "spawn_main" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_any_process_may_be_killed(backend, tmp_path):
    """A random process of a random host, at a random moment; the run restarts, and learns bit by bit the same."""
    num_kills = int(os.environ.get("KERASDP_KILLS", "20"))
    flags = [f"--epochs={EPOCHS}", "--checkpoint_every=10"]
    for code, output in ends(start(backend, tmp_path / "whole", *flags)):
        assert code == 0, output
    expected, draw, num_done = lines_of(tmp_path / "whole"), random.Random(7), 0
    for run in range(100):
        workdir = tmp_path / str(run)
        processes = start(backend, workdir, *flags, "--max_restarts=20")
        begin = time.monotonic()
        while num_done < num_kills and any(process.poll() is None for process in processes):
            time.sleep(draw.uniform(1, 12))
            living = workers(draw.choice(processes))
            if living and (workdir / "checkpoints").exists():
                os.kill(draw.choice(living), signal.SIGKILL)
                num_done += 1
        for code, output in ends(processes, 400):
            assert code == 0, output
        assert lines_of(workdir) == expected
        print(f"\n{backend}: {num_done} kills, {time.monotonic() - begin:.0f} s, {len(expected)} losses bit-equal")
        if num_done >= num_kills:
            return
    raise AssertionError(f"{num_done} kills in 100 runs")


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_many_starts_in_a_row(backend, tmp_path):
    """Each on a port of its own, and each ends. Every tenth has two devices on each host, the others one."""
    num_starts, seconds = int(os.environ.get("KERASDP_STARTS", "100")), []
    for number in range(num_starts):
        begin = time.monotonic()
        quick = ["--model=mlp", "--max_steps=2", "--checkpoint_every=never", f"--gpus={2 if number % 10 == 0 else 1}"]
        for code, output in ends(start(backend, tmp_path / str(number), *quick)):
            assert code == 0, output
        seconds.append(time.monotonic() - begin)
    print(f"\n{backend}: {num_starts} starts, {min(seconds):.0f} to {max(seconds):.0f} s each")
