"""A host that is lost ends the others, which say so; and the run resumes with the losses of an undisturbed one."""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from tests.helpers import HOST_BACKENDS, losses_in
from tests.hosts import netns
from tests.hosts.test_hosts import on_hosts
from tests.hosts.together import results_of

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not netns.hosts_available(), reason=netns.NO_HOSTS),
]
# Of fewer than 1,000 steps, which torch does not compile: so do the runs that end earlier.
SETTINGS = {"epochs": 400, "checkpoint_every": "20", "max_steps": 900, "log_every": 1, "hang_timeout": 20}
# What a host says that has lost the other one: of torch's Gloo, of torchrun, of jax, of the kit.
WORDS = re.compile(
    r"^error: .*|^\w+Error: .*|.*stopped sending heartbeats.*|.*Terminating process because.*"
    r"|.*[Cc]onnection (?:reset|closed|refused).*|.*RendezvousConnectionError.*"
    r"|.*Failed to send RPC.*|.*exitcode +: .*|^Timeout .*",
    re.MULTILINE,
)


def last_step(workdir):
    return max(int(path.stem.partition("-")[2]) for path in (workdir / "checkpoints").glob("step-*"))


def wait_for_checkpoint(workdir, processes):
    deadline = time.monotonic() + 240
    while not list(workdir.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.2)


def kill_all(host):
    for pid in host.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_end_of_rank(host):
    """Until torchrun alone is left on a host."""
    deadline = time.monotonic() + 90
    while len(host.processes()) > 1:
        assert time.monotonic() < deadline, "the rank waits"
        time.sleep(0.2)


def end_of(process, host, seconds, begin):
    """The exit code, what was said, and after how many seconds; it has ended within so many."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill_all(host)
        raise AssertionError("".join(process.communicate())) from None
    return process.returncode, stdout + stderr, time.monotonic() - begin


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", ["killed", "cable out"])
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_lost_host_ends_the_others(backend, fault, victim, tmp_path):
    """In seconds if its processes are killed, or on jax; without its network on torch after --hang_timeout.

    Where the first host is without network, torchrun (torch 2.13) itself waits for the store there, for minutes.
    """
    with netns.network(2) as hosts:
        processes = on_hosts(hosts, devices=1, backend=backend, workdir=str(tmp_path / "cut"), **SETTINGS)
        wait_for_checkpoint(tmp_path / "cut", processes)
        begin = time.monotonic()
        if fault == "killed":
            kill_all(hosts[victim])
        else:
            hosts[victim].set_cable(False)
        other = hosts[1 - victim]
        if backend == "torch" and fault == "cable out" and victim == 0:
            wait_for_end_of_rank(other)
            os.kill(processes[1].pid, signal.SIGKILL)
        code, said, seconds = end_of(processes[other.number], other, 90, begin)
        told = list(dict.fromkeys(line.strip()[:200] for line in WORDS.findall(said)))
        print(f"\n{backend}, host {victim} {fault}: the other one ends after {seconds:.1f} s, exit code {code}:")
        print("\n".join(f"    {line}" for line in told[:6]))
        kill_all(hosts[victim])
        processes[victim].communicate()
        assert code and told, said[-3000:]
        assert seconds < (30 if fault == "killed" or backend == "jax" else 60)
        if victim == 0 and fault == "cable out":
            resume(backend, hosts, tmp_path)


def resume(backend, hosts, tmp_path):
    """With the cable in again, or on new processes, the run resumes, and learns what an undisturbed one learns."""
    hosts[0].set_cable(True)
    last = last_step(tmp_path / "cut") + 40
    settings = SETTINGS | {"max_steps": last, "backend": backend, "devices": 1}
    results_of(on_hosts(hosts, workdir=str(tmp_path / "cut"), resume=True, **settings), timeout=300)
    results_of(on_hosts(hosts, workdir=str(tmp_path / "whole"), **settings), timeout=300)
    found, expected = (losses_in(tmp_path / name) for name in ("cut", "whole"))
    assert len(found) == last and found == expected
    print(f"{backend}: resumed, {last} losses bit-equal to those of an undisturbed run")


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_an_error_on_one_host_ends_the_others(backend):
    with netns.network(2) as hosts:
        begin = time.monotonic()
        processes = on_hosts(hosts, devices=1, backend=backend, fails=True, hang_timeout=60, epochs=40)
        own, other = [end_of(processes[rank], hosts[rank], 200, begin) for rank in (1, 0)]
    print(f"\n{backend}: ends after {own[2]:.1f} and {other[2]:.1f} s: {WORDS.findall(other[1])[:4]}")
    assert own[0] and other[0] and "bad luck" in own[1], own[1]
    assert other[2] - own[2] < 20
