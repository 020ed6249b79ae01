"""Two runs never write their checkpoints to one place: the second is told in one line."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import kerasdp
from kerasdp.checkpoint import files
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.checkpoint.storage import folder_at, locked_folder
from kerasdp.config import Config
from kerasdp.errors import UserError
from tests.helpers import ROOT

pytest.importorskip("fsspec")


def some(step):
    return Checkpoint(arrays={"model/kernel": np.full((7, 5), step, "float32")}, state={"step": step})


def test_a_folder_of_checkpoints_is_locked(tmp_path):
    """Whatever the workdirs of the two runs are."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    program = (
        "import sys, time, kerasdp.config as config\n"
        "with config.locked_workdir(sys.argv[1]):\n"
        "    print('has it', flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(UserError, match=f"--checkpoint_dir: .* is in use by another run .process {other.pid} on "):
            kerasdp.launch(print, num_devices=1, workdir=str(tmp_path / "own"), checkpoint_dir=str(place))
        other.kill()
    with locked_folder(Config(checkpoint_dir=str(place), workdir=str(tmp_path))):
        assert os.listdir(place) == [".lock"]
    assert os.listdir(place) == []


def test_a_folder_that_is_the_workdir_is_locked_once(tmp_path):
    both = {"checkpoint_dir": str(tmp_path), "workdir": f"{tmp_path}/./"}
    assert kerasdp.launch(lambda runner: 7, num_devices=1, backend="torch", **both) == 7


@pytest.fixture
def url(tmp_path):
    return f"memory://{tmp_path}/place"


def test_the_second_run_at_a_url_is_told(url):
    told = []
    first = files.Writer(url, 2, told.append)
    with pytest.raises(
        UserError, match="--checkpoint_dir: 'memory:.* is in use by another run .process .* on "
    ) as caught:
        files.Writer(url, 2, told.append)
    assert "\n" not in str(caught.value) and "resume it (--resume)" in str(caught.value)
    first.write(some(1))
    first.close()
    assert folder_at(url).names() == ["step-00000001.safetensors"] and not told
    files.Writer(url, 2, told.append).close()


def test_of_two_that_begin_at_once_one_is_told_before_it_writes(url, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kerasdp.checkpoint.storage.Marker.check", lambda marker: None)
        first, second = (files.Writer(url, 2, print) for _ in range(2))
    first.write(some(1))
    with pytest.raises(UserError, match="is in use by another run"):
        first.close()
    second.write(some(2))
    second.close()
    assert folder_at(url).names() == ["step-00000002.safetensors"]


def test_a_run_that_was_killed_is_followed_by_the_one_that_resumes(url):
    killed = files.Writer(url, 2, print)
    killed.write(some(1))
    killed.wait()
    resumed = files.Writer(url, 2, print, takes_over=True)
    resumed.write(some(2))
    resumed.close()
    assert sorted(folder_at(url).names()) == ["step-00000001.safetensors", "step-00000002.safetensors"]


@pytest.mark.parametrize("content", ["", "[1]", "\xff", "{", "[" * 5000, json.dumps({"host": "\x1b[2J\n" * 900})])
def test_whatever_lies_there_is_one_line(content, url):
    with folder_at(url).writing("in-use.json") as path, open(path, "w", encoding="latin-1") as file:
        file.write(content)
    with pytest.raises(UserError, match="is in use by another run") as caught:
        files.Writer(url, 2, print)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 400
