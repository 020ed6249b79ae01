"""A run that is watched over: restarted where a worker dies, and ended where one hangs or a signal asks for it."""

import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from kerasdp.config import Config
from kerasdp.errors import RunError, UserError, WorkerError
from kerasdp.processes import outcome, signals, workers
from tests import helpers
from tests.helpers import ROOT, environment, left_after, session_members


def settings(folder, **choices):
    return Config(workdir=str(folder), **choices)


# Functions of a module, since they run in new processes. `train` takes the number of the attempt.
def work(config, train):
    attempts = pathlib.Path(config.workdir) / "attempts"
    with open(attempts, "a") as file:
        file.write(f"resume={config.resume}\n")
    return train(len(attempts.read_text().splitlines()))


def train_on_third_attempt(attempt):
    if attempt < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return "trained"


def die(attempt):
    os._exit(7)


def refuse(attempt):
    raise UserError("expected a loss. Received: none")


def ignore_signals(attempt):
    """As native code does that waits for something."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def finish_step(attempt):
    """As a run with checkpoints does: it notes the signal, and ends when its step is over."""
    with signals.noticed(), signals.awaited():
        while signals.noted() is None:
            time.sleep(0.1)
        time.sleep(3)
    os._exit(128 + signal.SIGTERM)


def sleep_long(folder):
    pathlib.Path(folder, f"{os.getpid()}.pid").touch()
    time.sleep(60)


def attempts_in(folder):
    return (folder / "attempts").read_text().splitlines()


def test_a_worker_that_dies_is_restarted_and_resumes(tmp_path, capsys):
    config = settings(tmp_path, max_restarts=2)
    assert workers.supervise(work, config, train_on_third_attempt) == "trained"
    assert attempts_in(tmp_path) == ["resume=False", "resume=True", "resume=True"]
    errors = capsys.readouterr().err
    assert errors.count("the worker was ended by SIGKILL") == 2
    assert "restart 2 of 2, from the last checkpoint" in errors


def test_restarts_are_used_up(tmp_path):
    with pytest.raises(WorkerError, match="the worker ended with exit code 7"):
        workers.supervise(work, settings(tmp_path, max_restarts=1), die)
    assert len(attempts_in(tmp_path)) == 2


def test_a_users_error_is_not_tried_again(tmp_path):
    with pytest.raises(UserError, match="expected a loss"):
        workers.supervise(work, settings(tmp_path, max_restarts=3), refuse)
    assert len(attempts_in(tmp_path)) == 1


def test_a_worker_is_not_restarted_after_a_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "noted", lambda: signal.SIGTERM)
    with pytest.raises(SystemExit):
        workers.supervise(work, settings(tmp_path, max_restarts=3), die)
    assert len(attempts_in(tmp_path)) == 1


def signalled(tmp_path, work_of_rank, count, seconds_between=2.5):
    """Runs a worker, and sends this process SIGTERM; returns how the run ended, and the seconds since the last one."""
    sent = []

    def send():
        while not (tmp_path / "attempts").exists():
            time.sleep(0.1)
        time.sleep(1)
        for _ in range(count):
            time.sleep(seconds_between * bool(sent))
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with pytest.raises(SystemExit) as end:
        workers.supervise(work, settings(tmp_path), work_of_rank)
    return end.value.code, time.monotonic() - sent[-1]


def test_a_worker_that_finishes_its_step_is_waited_for(tmp_path):
    code, seconds = signalled(tmp_path, finish_step, 1)
    assert code == 128 + signal.SIGTERM and seconds > 3


def of_rank(ways, *_):
    """Ends in a way of its own."""
    way = ways[outcome.current.number]
    if way == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "finds it gone":
        time.sleep(1.0)
        raise RuntimeError("Connection closed by peer")
    if way == "refuses":
        raise UserError("expected a loss. Received: none")
    if way == "raises":
        raise ValueError("bad luck")
    if way == "aborts later":
        while outcome.read(outcome.current._replace(number=0)) is None:  # the first one has not raised yet
            time.sleep(0.05)
        time.sleep(0.8)  # who dies within half a second counts as the first
        os.abort()
    if way == "waits":
        time.sleep(60)
    return way


@pytest.mark.short("refuses")
@pytest.mark.parametrize(
    ("ways", "words"),
    [
        (("raises", "aborts later"), "ValueError: bad luck"),
        (("finds it gone", "dies"), "rank 1 was ended by SIGKILL"),
        (("finds it gone", "refuses", "waits"), "expected a loss. Received: none"),
        (("dies", "waits"), "rank 0 was ended by SIGKILL"),
    ],
    ids=["aborts", "dies", "refuses", "waits"],
)
def test_the_one_that_was_first_is_seen(ways, words):
    """Others fail for it, and some wait for ever."""
    begin = time.monotonic()
    with pytest.raises(RunError, match=words):
        workers.run_workers(of_rank, (ways,), names=[f"rank {number}" for number in range(len(ways))])
    assert time.monotonic() - begin < 20


@pytest.mark.proof
def test_a_server_that_was_killed_is_started_again():
    """And blocks signals, as the one before: those to a group of processes would end it, and its workers."""
    ways, names, preload = ("one", "two"), ["rank 0", "rank 1"], ["kerasdp.errors"]
    assert workers.run_workers(of_rank, (ways,), names=names, preload=preload) == "one"
    server = multiprocessing.forkserver._forkserver
    os.kill(killed := server._forkserver_pid, signal.SIGKILL)
    time.sleep(0.5)
    assert workers.run_workers(of_rank, (ways,), names=names, preload=preload) == "one"
    status = pathlib.Path(f"/proc/{server._forkserver_pid}/status").read_text()
    assert server._forkserver_pid != killed
    assert int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.proof
def test_a_server_that_ends_while_it_imports_is_a_line(tmp_path):
    (tmp_path / "ends.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    program = (
        "from tests.processes.test_workers import of_rank, workers\n"
        "try:\n"
        "    workers.run_workers(of_rank, (('one',),), names=['rank 0'], preload=['ends'])\n"
        "except workers.WorkerError as error:\n"
        "    print(error)"
    )
    done = helpers.run("-c", program, PYTHONPATH=str(tmp_path), timeout=60)
    assert "cannot start, because the server process that imports the framework" in done.stdout and not done.stderr


@pytest.mark.short("forked")
@pytest.mark.parametrize("preload", [None, ["kerasdp.errors"]], ids=["spawned", "forked"])
def test_workers_end_with_the_process_that_started_them(preload, tmp_path):
    """By `kill -9`, too, and where a server has forked them, whose children they are."""
    program = (
        "from tests.processes.test_workers import sleep_long, workers\n"
        f"workers.run_workers(sleep_long, ({str(tmp_path)!r},), names=['rank 0', 'rank 1'], preload={preload})"
    )
    env = environment(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", program], env=env, start_new_session=True)
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < end:
            time.sleep(0.1)
        assert len(session_members(parent.pid)) > 2
    finally:
        parent.kill()
        parent.wait()
    assert not left_after(parent.pid, 10)


def test_a_second_signal_ends_the_workers_at_once(tmp_path, capsys):
    code, seconds = signalled(tmp_path, ignore_signals, 2)
    assert code == 128 + signal.SIGTERM and seconds < 2


@pytest.mark.proof
def test_what_others_fork_from_the_server_gets_signals():
    """From Python 3.14 on the processes of a `multiprocessing.Pool` come from it."""
    workers.run_workers(of_rank, (("one",),), names=["rank 0"], preload=["kerasdp.errors"])
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(20)
    assert process.exitcode == -signal.SIGTERM
