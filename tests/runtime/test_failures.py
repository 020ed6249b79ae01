"""Runs that go wrong: they end soon, with the right error, and leave no process behind."""

import itertools
import os
import re
import signal
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, all_but, killed_at_the_end, left_after, run, start


def fail(backend, count, mode, folder):
    return run(PROGRAMS / "fail.py", backend, count, mode, folder, backend=backend)


@all_but("jax")
def test_a_rank_that_raises_ends_all_with_its_own_error(backend, tmp_path):
    done = fail(backend, 2, "raise", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: the last rank gives up") == 1
    assert "Connection" not in done.stderr


@all_but("jax", "tensorflow")
def test_a_device_with_too_little_memory_is_a_line(backend, tmp_path):
    """On the CPU frameworks say it in their own words, as on a GPU."""
    done = fail(backend, 2, "memory", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: a device has too little memory ("), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
def test_a_rank_that_is_killed_ends_all(tmp_path):
    # The other rank waits for it in a collective, fails, too, and must not be the one that is seen. Workers that
    # `server.py` forked end fast enough for that; which of two that have ended is seen first is a matter of chance.
    for number in range(3):
        done = fail("torch", 2, "kill", tmp_path / str(number))
        assert done.returncode == 1
        assert (
            done.stderr.strip().splitlines()[-1] == "error: rank 1 was ended by SIGKILL: is the system short of memory?"
        )


@all_but("tensorflow")
def test_replicas_that_drift_apart_are_an_error(backend, tmp_path):
    done = fail(backend, 2, "drift", tmp_path)
    assert done.returncode == 1
    assert "hold different values in 1 variables, first in" in done.stderr.splitlines()[-1]


@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="only TensorFlow has a thread a device")
def test_ctrl_c_while_threads_are_started_ends_the_program():
    done = run(PROGRAMS / "interrupted_threads.py", backend="tensorflow", timeout=60)
    assert done.returncode == 130 and not done.stderr


OTHER = "error: the ranks do different things: "
# Of ranks whose exchanges are of different kinds the first that sees it says where it is.
ELSEWHERE = OTHER + r"rank \d, at .*, and another one wait for each other in different calls: fit, evaluate"
SAME = r"error: fit \(alone.py:\d+\): expected the same "
# What one rank does alone: the exit code, and what is said.
ALONE = {
    "evaluates_before_fit": (2, OTHER + r"rank 0 calls evaluate \(alone.py:\d+\), rank 1 calls fit \(alone.py:\d+\)"),
    "evaluates_in_callback": (2, ELSEWHERE),
    "returns_early": (2, OTHER + r"rank 0 calls fit .*, rank 1 has left the training function"),
    "swallows": (2, ELSEWHERE),
    "swallows_and_sleeps": (
        1,
        r"rank 1 hangs at .*alone.py:\d+, in swallows_and_sleeps, rank 0 waits at .*, in fit: ",
    ),
    "builds_another_model": (
        2,
        SAME + r"model on all ranks. Received: a Sequential of 15 numbers, 2 weights trained on",
    ),
    "has_less_data": (
        2,
        SAME + r"x on all ranks. Received: float32 \(64, 4\) on rank 0, float32 \(56, 4\) on rank 1; every",
    ),
    "has_other_values": (
        2,
        SAME + r"x on all ranks. .* with some values on rank 0, others on rank 1; .*seed what is random",
    ),
    "validates": (2, SAME + r"validation_data on all ranks. Received: nothing on rank 0"),
    "exits": (1, r"rank 1 ended by itself, without an error"),
    "calls_sys_exit": (2, ELSEWHERE),
    "calls_sys_exit_with_3": (3, r"rank 1 called sys.exit\(3\)"),
    "launches": (2, r"error: launch: the function of another launch runs in this process"),
    "sleeps": (
        1,
        r"rank 1 hangs at .*alone.py:\d+, in .*, rank 0 waits at .*alone.py:\d+, in fit: nothing moved for 3 s",
    ),
}
# With the default: nothing of it has to be waited for; but what hangs needs a limit.
HANG_TIMEOUTS = {"sleeps": 3, "swallows_and_sleeps": 3}
# Ways in which ranks may differ.
ALLOWED = {"has_a_callback": 0, "all_swallow_and_fit": 0, "works_after_fit": 1, "all_call_sys_exit": 0}
ALONE_IN_SHORT = ("evaluates_before_fit", "evaluates_in_callback", "swallows", "launches", "has_a_callback")


def alone(mode, hang_timeout):
    """Returns the end of a program in which a rank does something alone, and the seconds from then on."""
    done = run(PROGRAMS / "alone.py", "torch", 2, mode, hang_timeout, backend="torch", timeout=60)
    end, begins = time.time(), re.findall(r"BEGIN (\S+)", done.stdout)
    return done, end - max(map(float, begins), default=end)


def modes(cases):
    return [pytest.param(mode, marks=[] if mode in ALONE_IN_SHORT else pytest.mark.proof) for mode in cases]


@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
@pytest.mark.parametrize("mode", modes(ALONE))
def test_what_one_rank_does_alone_ends_the_run(mode):
    code, words = ALONE[mode]
    done, seconds = alone(mode, HANG_TIMEOUTS.get(mode, 0))
    print(f"{mode}: {seconds:.1f} s: {done.stderr.strip()}")
    assert done.returncode == code, done.stderr
    assert re.search(words, done.stderr), done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 or (mode in HANG_TIMEOUTS and all(f"rank {rank}:" in lines for rank in (0, 1)))
    assert seconds < HANG_TIMEOUTS.get(mode, 0) + 6


@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
@pytest.mark.parametrize("mode", modes(ALLOWED))
def test_what_one_rank_may_do_alone(mode):
    done, _ = alone(mode, ALLOWED[mode])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ENDS") == 2 * (mode != "all_call_sys_exit")


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
@pytest.mark.parametrize(("number", "seconds_to_end"), [(signal.SIGTERM, 25), (signal.SIGKILL, 3), (signal.SIGINT, 10)])
def test_ranks_that_ignore_signals_end_with_their_parent(number, seconds_to_end):
    process = start(PROGRAMS / "alone.py", "torch", 2, "ignores_signals", 0, backend="torch")
    next(line for line in process.stdout if line.startswith("BEGIN"))
    begin = time.monotonic()
    with killed_at_the_end(process):
        process.send_signal(number)
        process.wait(timeout=40)
        left = left_after(process.pid, 40)
        seconds, said = time.monotonic() - begin, process.stderr.read()
        print(f"{number.name}: {seconds:.1f} s, exit code {process.returncode}: {said}")
        assert left == [] and seconds < seconds_to_end
        if number == signal.SIGTERM:
            assert process.returncode == 128 + signal.SIGTERM
            assert re.search(r"SIGTERM was ignored for 2\d s: rank 0 hangs at .*, in <lambda>, rank 1 .*; killed", said)


def started(backend, mode, folder):
    """A run that trains."""
    process = start(PROGRAMS / "fail.py", backend, 2, mode, folder, backend=backend)
    for line in process.stdout:
        if re.match(r"READY \d+", line):
            break
    return process


SIGNALS = {"ctrl-c": (signal.SIGINT, 130), "term": (signal.SIGTERM, 99)}
IN_SHORT = (("torch", "ctrl-c"), ("jax", "term"), ("tensorflow", "ctrl-c"))  # the others are proofs


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
    with killed_at_the_end(process):
        # A terminal sends Ctrl-C to every process of the group, `kill` to one.
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        begin = time.monotonic()
        assert process.wait(timeout=20) == code
        assert left_after(process.pid, 20) == []
        assert time.monotonic() - begin < 10
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_all_processes_is_one_signal(number, tmp_path):
    """Schedulers send it to all processes of a job; the first of them passes it on, too."""
    process = started(BACKENDS[0], "wait", tmp_path)
    with killed_at_the_end(process):
        os.killpg(process.pid, number)
        assert process.wait(timeout=20) == 99
        assert re.search(r"stopped by .* after step \d+, saved in", process.stderr.read())


@pytest.mark.parametrize("name", [BACKENDS[0], pytest.param(BACKENDS[-1], marks=pytest.mark.proof)])
def test_a_second_signal_ends_a_long_step(name, tmp_path):
    """The first one waits for the step, which here takes longer than anyone will wait."""
    process = started(name, "slow", tmp_path)
    with killed_at_the_end(process):
        process.send_signal(signal.SIGUSR1)
        time.sleep(2.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
        assert left_after(process.pid, 10) == []
