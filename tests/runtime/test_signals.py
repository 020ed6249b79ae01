import contextlib
import os
import signal

import pytest

from kerasdp.runtime import signals


@pytest.fixture
def left_with(monkeypatch):
    """The exit codes with which the process would have ended at once."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def test_a_signal_to_a_group_of_processes_counts_once(left_with):
    """It reaches a worker by itself, and from its parent, which passes it on."""
    with signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert signals.noted() is signal.SIGUSR1
    assert left_with == []


def test_a_second_signal_ends_the_run_at_once(left_with, monkeypatch):
    with signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
    assert left_with == [128 + signal.SIGTERM]
    monkeypatch.setattr(signals, "SECONDS_OF_ONE", 0.0)  # the same one, later
    with signals.noticed(), signals.awaited():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    assert left_with == [128 + signal.SIGTERM, 128 + signal.SIGUSR1]


def test_without_checkpoints_the_first_one_ends_the_run():
    with signals.noticed(), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_ctrl_c_is_no_request_to_save():
    """Also if its exception was lost in a callback of a framework's native code."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.noticed(), signals.awaited():
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signals.noted()
    finally:
        signal.signal(signal.SIGINT, kept)
