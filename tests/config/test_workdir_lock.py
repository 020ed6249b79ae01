"""One run at a time has a workdir; what ends, however it ends, holds it no longer."""

import os
import signal
import socket
import subprocess
import sys

import pytest

import kerasdp
from kerasdp.checkpoint.storage import locked_folder
from kerasdp.errors import UserError
from tests.helpers import ROOT

HOLD = """
import sys, time
from kerasdp.checkpoint.storage import locked_folder
with locked_folder(sys.argv[1]):
    print("has it", flush=True)
    time.sleep(60)
"""


def holder(folder):
    """A process of a run that has the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "has it\n"
    return process


def test_a_second_run_is_refused_by_name_and_a_killed_one_is_forgotten(tmp_path):
    other = holder(tmp_path)
    with pytest.raises(UserError, match="workdir: .* is in use by another run"):
        kerasdp.launch(print, num_devices=1, workdir=str(tmp_path))
    named = f"in use by another run .process {other.pid} on {socket.gethostname()}.; wait for its end, or choose"
    with pytest.raises(UserError, match=named), locked_folder(str(tmp_path)):
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    with locked_folder(str(tmp_path)):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_resumed_run_waits_for_the_one_before(tmp_path):
    other = holder(tmp_path)
    ending = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {other.pid}"])
    with locked_folder(str(tmp_path), resume=True):
        assert ending.wait() == 0
    other.wait()


def test_the_lock_of_a_forked_process_is_lifted_as_well(tmp_path):
    reader, writer = os.pipe()
    with locked_folder(str(tmp_path)):
        child = os.fork()
        if child == 0:  # holds the open file as long as it lives
            os.read(reader, 1)
            os._exit(0)
    try:
        with locked_folder(str(tmp_path)):
            pass
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
