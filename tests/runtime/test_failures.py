"""Runs that go wrong: they end soon, with the right error, and leave no process behind."""

import itertools
import os
import re
import signal
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, run, session_members, start


def fail(backend, count, mode, folder):
    return run(PROGRAMS / "fail.py", backend, count, mode, folder, backend=backend)


def test_a_rank_that_raises_ends_all_with_its_own_error(backend, tmp_path):
    done = fail(backend, 2, "raise", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: the last rank gives up") == 1
    assert "Connection" not in done.stderr


@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
def test_a_rank_that_is_killed_ends_all(tmp_path):
    # The other rank waits for it in a collective, fails, too, and must not be the one that is seen. Workers that
    # `server.py` forked end fast enough for that; which of two that have ended is seen first is a matter of chance.
    for number in range(5):
        done = fail("torch", 2, "kill", tmp_path / str(number))
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1] == "error: rank 1 was ended by SIGKILL"


def test_replicas_that_drift_apart_are_an_error(backend, tmp_path):
    done = fail(backend, 2, "drift", tmp_path)
    assert done.returncode == 1
    assert "hold different values in 1 variables, first in" in done.stderr.splitlines()[-1]


def started(backend, mode, folder):
    """A run that trains."""
    process = start(PROGRAMS / "fail.py", backend, 2, mode, folder, backend=backend)
    for line in process.stdout:
        if re.match(r"READY \d+", line):
            break
    return process


SIGNALS = {"ctrl-c": (signal.SIGINT, 130), "term": (signal.SIGTERM, 99)}
IN_SHORT = (("torch", "ctrl-c"), ("torch", "term"), ("jax", "term"), ("tensorflow", "ctrl-c"))  # the others are proofs


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*way, marks=[] if way in IN_SHORT else pytest.mark.proof)
        for way in itertools.product(BACKENDS, SIGNALS)
    ],
)
def test_a_signal_ends_everything(name, kind, tmp_path):
    number, code = SIGNALS[kind]
    process = started(name, "wait", tmp_path)
    try:
        # A terminal sends Ctrl-C to every process of the group, `kill` to one.
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        begin = time.monotonic()
        assert process.wait(timeout=20) == code
        while session_members(process.pid) and time.monotonic() - begin < 20:
            time.sleep(0.1)
        assert session_members(process.pid) == []
        assert time.monotonic() - begin < 10
        assert "Traceback" not in process.stderr.read()
    finally:
        for left in session_members(process.pid):
            os.kill(left, signal.SIGKILL)


def test_a_signal_to_all_processes_is_one_signal(tmp_path):
    """Schedulers send it to all processes of a job; the first of them passes it on, too."""
    process = started(BACKENDS[0], "wait", tmp_path)
    try:
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.wait(timeout=20) == 99
        assert re.search(r"stopped by .* after step \d+, saved in", process.stderr.read())
    finally:
        for left in session_members(process.pid):
            os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize("name", dict.fromkeys((BACKENDS[0], BACKENDS[-1])))
def test_a_second_signal_ends_a_long_step(name, tmp_path):
    """The first one waits for the step, which here takes longer than anyone will wait."""
    process = started(name, "slow", tmp_path)
    try:
        process.send_signal(signal.SIGUSR1)
        time.sleep(2.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
        begin = time.monotonic()
        while session_members(process.pid) and time.monotonic() - begin < 10:
            time.sleep(0.1)
        assert session_members(process.pid) == []
    finally:
        for left in session_members(process.pid):
            os.kill(left, signal.SIGKILL)
