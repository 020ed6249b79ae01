"""Hosts of one run that were started differently: named in one line on each of them, soon, or trained alike."""

import json
import re
import time

import pytest

from tests.helpers import HOST_BACKENDS, PROGRAMS, finish, kill_session, start
from tests.hosts.together import free_port, place_in_run

pytestmark = pytest.mark.proof
ENDS_TOGETHER, RAISES = "-", "raises_before"
# What a program of the user's does otherwise on host 1, and what the line is about.
CASES = {
    "has_less_data": r"\b64\b.*\b56\b",
    "has_other_weights": "weight|variable|bias",
    "evaluates_before_fit": "evaluate",
    RAISES: "error: another process of the run has ended|stopped sending heartbeats",  # of the kit, or of JAX
    "stops_within": ENDS_TOGETHER,  # what one rank decides is what all do
}


def ended(programs, seconds):
    """The ends of programs that have so many seconds together; those that hang are killed, and said to."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(program.poll() is None for program in programs):
        time.sleep(0.05)
    hang = [number for number, program in enumerate(programs) if program.poll() is None]
    for program in programs:
        kill_session(program.pid)
    done = [finish(program, 20) for program in programs]
    assert not hang, f"hosts {hang} hang\n" + "\n".join(each.stdout + each.stderr for each in done)
    return done


def two_hosts(backend, case, **changes):
    """Ends of a program on two hosts, of which host 1 has some choices otherwise."""
    port, programs = free_port(), []
    for rank in (0, 1):
        fields = json.dumps({"backend": backend, "seed": 0} | (changes if rank else {}))
        place = place_in_run(backend, rank, 2, port)
        programs.append(start(PROGRAMS / "alone.py", case, fields, backend=backend, **place))
    return ended(programs, 60)


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_a_choice_that_differs_is_named_on_every_host(backend):
    """As a version is: both are compared as one record."""
    words = "^error: launch .*: expected the same seed on all ranks. Received: 0 on rank 0, 7 on rank 1; give each"
    for done in two_hosts(backend, "nothing", seed=7):
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert re.search(words, done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_what_host_1_does_otherwise_is_named_on_every_host(backend, case):
    done = two_hosts(backend, case)
    if CASES[case] == ENDS_TOGETHER:
        assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
        return
    if case == RAISES:  # a stack, as of any error of a program's own
        assert "RuntimeError: the second host gives up" in done.pop().stderr
        assert done[0].returncode and re.search(CASES[case], done[0].stderr), done[0].stderr
        return
    for each in done:
        text = each.stdout + each.stderr
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        print(f"{backend}, {case}: exit code {each.returncode}, {errors}")
        assert each.returncode in (1, 2) and errors and "Traceback" not in text, text
        assert re.search(CASES[case], errors[0]), errors[0]
    # Both may say the same; at least one names who does what.
    assert re.search("process 1|rank 1", done[0].stderr), done[0].stderr


@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_hosts_that_do_the_same_train(backend):
    for done in two_hosts(backend, "nothing"):
        assert done.returncode == 0 and "ENDS" in done.stdout, done.stdout + done.stderr
