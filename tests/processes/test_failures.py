"""Runs that go wrong: they end soon, with the right error, and leave no process behind."""

import json
import re
import signal
import time

import pytest

from tests.helpers import BACKENDS, PROGRAMS, killed_at_the_end, left_after, run, start


def alone(mode, backend="torch", **fields):
    """Returns the end of a program in which a rank does something alone, and the seconds from then on."""
    text = json.dumps({"backend": backend, "num_devices": 2} | fields)
    done = run(PROGRAMS / "alone.py", mode, text, backend=backend, timeout=60)
    end, begins = time.time(), re.findall(r"BEGIN (\S+)", done.stdout)
    return done, end - max(map(float, begins), default=end)


# On the CPU frameworks say it in their own words, as on a GPU.
ON_A_DEVICE = {
    "fills_the_memory": "error: a device has too little memory (",
    "drifts": "hold different values in 1 variables, first in",  # of torch in short: training/test_own_steps.py
}


@pytest.mark.short("torch-fills_the_memory", "jax-drifts")
@pytest.mark.parametrize("mode", ON_A_DEVICE)
def test_what_goes_wrong_on_a_device_is_a_line(mode, backend):
    done, _ = alone(mode, backend)
    assert done.returncode == 1
    assert ON_A_DEVICE[mode] in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="only TensorFlow has a thread a device")
def test_ctrl_c_while_threads_are_started_ends_the_program():
    done = run(PROGRAMS / "interrupted_threads.py", backend="tensorflow", timeout=60)
    assert done.returncode == 130 and not done.stderr


OTHER = "error: the ranks do different things: "
# Of ranks whose exchanges are of different kinds the first that sees it says where it is.
ELSEWHERE = OTHER + r"rank \d waits at .*, and another rank waits in a different call: call fit, evaluate and predict "
SAME = r"error: fit \(alone.py:\d+\): expected the same "
OTHER_X = SAME + "x on all ranks."
# What one rank does alone: the exit code, and what is said.
ALONE = {
    "evaluates_before_fit": (2, OTHER + r"rank 0 calls evaluate \(alone.py:\d+\), rank 1 calls fit \(alone.py:\d+\)"),
    "evaluates_in_callback": (2, ELSEWHERE),
    "returns_early": (2, OTHER + r"rank 0 calls fit .*, rank 1 has ended the training function"),
    "swallows": (2, ELSEWHERE),
    "swallows_and_sleeps": (1, r"rank 0 is at .*, in fit, rank 1 is at .*alone.py:\d+, in swallows_and_sleeps: "),
    "builds_another_model": (2, SAME + "model on all ranks. Received: a Sequential of 15 parameters, 2 trainable"),
    "has_less_data": (2, OTHER_X + r" Received: float32 \(64, 4\) on rank 0, float32 \(56, 4\) on rank 1; pass"),
    "has_other_values": (2, OTHER_X + " .* on rank 0, other values in the same shape on rank 1; .*seed random code"),
    "validates": (2, SAME + r"validation_data on all ranks. Received: nothing on rank 0"),
    "exits": (1, r"rank 1 ended with exit code 0, but without a result"),
    "calls_sys_exit": (2, ELSEWHERE),
    "calls_sys_exit_with_3": (3, r"rank 1 called sys.exit\(3\)"),
    "launches": (2, r"error: launch: another call of launch is still running in this process"),
    "sleeps": (1, r"rank 0 is at .*alone.py:\d+, in fit, rank 1 is at .*alone.py:\d+, in .*: no progress for "),
}
# With the default: nothing of it has to be waited for; but what hangs needs a limit.
HANG_TIMEOUTS = {"sleeps": 3, "swallows_and_sleeps": 3}
# Ways in which ranks may differ.
ALLOWED = ("has_a_callback", "all_swallow_and_fit", "works_after_fit", "all_call_sys_exit")
ALONE_IN_SHORT = ("evaluates_before_fit", "swallows", "has_a_callback")


def modes(cases):
    return [pytest.param(mode, marks=[] if mode in ALONE_IN_SHORT else pytest.mark.proof) for mode in cases]


@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
@pytest.mark.parametrize("mode", modes(ALONE))
def test_what_one_rank_does_alone_ends_the_run(mode):
    code, words = ALONE[mode]
    limit = HANG_TIMEOUTS.get(mode)
    done, seconds = alone(mode, hang_timeout=limit)
    print(f"{mode}: {seconds:.1f} s: {done.stderr.strip()}")
    assert done.returncode == code, done.stderr
    assert re.search(words, done.stderr), done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 or (mode in HANG_TIMEOUTS and all(f"rank {rank}:" in lines for rank in (0, 1)))
    assert seconds < (limit or 0) + 6


@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
@pytest.mark.parametrize("mode", modes(ALLOWED))
def test_what_one_rank_may_do_alone(mode):
    done, _ = alone(mode, hang_timeout=1 if mode == "works_after_fit" else None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ENDS") == 2 * (mode != "all_call_sys_exit")


@pytest.mark.proof
@pytest.mark.skipif("torch" not in BACKENDS, reason="only torch has a process a device")
@pytest.mark.parametrize(("number", "seconds_to_end"), [(signal.SIGKILL, 3), (signal.SIGINT, 10)])
def test_ranks_that_ignore_signals_end_with_their_parent(number, seconds_to_end):
    fields = json.dumps({"backend": "torch", "num_devices": 2})
    process = start(PROGRAMS / "alone.py", "ignores_signals", fields, backend="torch")
    next(line for line in process.stdout if line.startswith("BEGIN"))
    begin = time.monotonic()
    with killed_at_the_end(process):
        process.send_signal(number)
        process.wait(timeout=40)
        left = left_after(process.pid, 40)
        seconds, said = time.monotonic() - begin, process.stderr.read()
        print(f"{number.name}: {seconds:.1f} s, exit code {process.returncode}: {said}")
        assert left == [] and seconds < seconds_to_end


@pytest.mark.parametrize("name", [BACKENDS[0], pytest.param(BACKENDS[-1], marks=pytest.mark.proof)])
def test_a_second_signal_ends_a_long_step(name, tmp_path):
    """The first one waits for the step, which here takes longer than anyone will wait."""
    process = start(PROGRAMS / "signalled.py", "script", name, 2, tmp_path, backend=name, SLOW="1")
    with killed_at_the_end(process):
        assert "READY\n" in process.stdout
        process.send_signal(signal.SIGUSR1)
        time.sleep(2.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
        assert left_after(process.pid, 10) == []
