import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from kerasdp.errors import PreemptedError
from kerasdp.processes import signals


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Other tests of this process see no signal; here Ctrl-C raises, wherever the tests run."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)
    signals._noted.clear()


@pytest.fixture
def left_with(monkeypatch):
    """The exit codes with which the process would have ended at once."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_second_signal_ends_the_run_at_once(left_with, monkeypatch):
    with signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(1.3)
    assert left_with == [128 + signal.SIGTERM]
    left_with.clear()
    monkeypatch.setattr(signals, "SECONDS_OF_ONE", 0.1)  # the same one, later
    with signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.2)
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(1.3)
    assert left_with == [128 + signal.SIGUSR1]


@pytest.mark.parametrize("native", [ctypes.CDLL, ctypes.PyDLL], ids=["without the interpreter", "which it keeps"])
def test_a_signal_that_arrives_twice_before_a_long_call_is_one(native, left_with):
    """The second copy arrives at once, and is handled when the call has ended: what counts is when it arrived."""
    with signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(0.1)
        copy = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -USR1 {os.getpid()}"])
        native(None).sleep(3)
        copy.wait()
        assert signals.noted() is signal.SIGUSR1
        time.sleep(0.2)
    assert left_with == []


class Loses:
    """What runs when it is taken away, where an exception is lost."""

    def __del__(self):
        for _ in range(200):
            time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_exception_that_is_lost_comes_again(number, capsys):
    """An interpreter prints what is raised in `__del__`, or in a callback of the garbage collector, and goes on."""
    began, timer = time.monotonic(), threading.Timer(0.3, os.kill, (os.getpid(), number))
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended, signals.noticed():
        timer.start()
        Loses()
        time.sleep(10)
    assert time.monotonic() - began < 5
    assert isinstance(ended.value, KeyboardInterrupt) == (number == signal.SIGINT)
    assert "ignored" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_error_that_is_made_of_a_signal_is_the_signal(number):
    """By native code, and by a bare `except:` of a framework."""
    with pytest.raises((KeyboardInterrupt, SystemExit)) as ended, signals.noticed():
        try:
            signal.raise_signal(number)
        except BaseException:
            raise TypeError("cannot find the minimum") from None
    assert isinstance(ended.value, KeyboardInterrupt) == (number == signal.SIGINT)
    with pytest.raises(TypeError), signals.noticed(), signals.awaited():  # one that waits for the step makes no error
        signal.raise_signal(signal.SIGTERM)
        raise TypeError("of the step itself")


def test_without_checkpoints_the_first_one_ends_the_run():
    with signals.noticed(), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_ctrl_c_waits_for_the_step_and_a_second_one_does_not(monkeypatch):
    """One that a launcher sends to the same processes as the terminal is no second one."""
    with signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signals.noted() is signal.SIGINT
        signals.leave_if_asked()
        time.sleep(0.4)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one was lost")
        with pytest.raises(KeyboardInterrupt):  # also if its exception was lost in native code
            signals.leave_if_asked()
    with pytest.raises(KeyboardInterrupt), signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("a process that loads the data got it, too")


def test_signals_are_passed_on_and_a_second_one_is_raised(monkeypatch):
    sent, worker = [], types.SimpleNamespace(pid=-1)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    with pytest.raises(KeyboardInterrupt), signals.passed_on(lambda: [worker]):
        signal.raise_signal(signal.SIGINT)
        assert sent == [signal.SIGUSR1]  # SIGINT they do not heed: a terminal sends it to them, too
        raise PreemptedError("a worker has saved")
    with pytest.raises(KeyboardInterrupt), signals.passed_on(lambda: [worker]):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.4)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")
    with pytest.raises(SystemExit) as ended, signals.passed_on(lambda: [worker]):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # a copy
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("not reached")
    assert sent == [signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM] and ended.value.code == 128 + signal.SIGUSR1


# Waits in native code for ever: the main thread locks what it has locked.
STUCK = """
import contextlib, ctypes, multiprocessing, os, signal, sys
from kerasdp.processes import signals
signals.SECONDS_OF_ONE = 0.3
with signals.noticed(), signals.awaited():
    if (child := os.fork()) == 0:  # whose signals are its own
        signal.raise_signal(signal.SIGUSR1)
        os._exit(0)
    os.waitpid(child, 0)
    if sys.argv[1:]:
        signal.raise_signal(signal.SIGTERM)
    lock = ctypes.create_string_buffer(256)
    print("stuck", flush=True)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize(
    ("noted", "sent"),
    [([], [signal.SIGTERM, signal.SIGUSR1]), (["noted"], [signal.SIGUSR1])],
    ids=["second", "second_after_one_that_was_noted"],
)
def test_a_main_thread_in_native_code_is_left(noted, sent):
    """No handler of Python is called there."""
    command = [sys.executable, "-c", STUCK, *noted]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "stuck\n"
        time.sleep(0.4)
        for number in sent:
            process.send_signal(number)
            time.sleep(0.2)
        _, errors = process.communicate(timeout=6)
    finally:
        process.kill()
    assert process.returncode == 128 + sent[-1], errors
    assert f"ended by {sent[-1].name}: the main thread waits in native code" in errors
