"""Checkpoints in a folder, or under a URL: the same, whole or not there."""

import os
import pathlib
import signal
import sys

import numpy as np
import pytest

from kerasdp import Config
from kerasdp.checkpoint import files
from kerasdp.checkpoint.files import Checkpoint
from kerasdp.checkpoint.storage import folder_at, require_folder
from kerasdp.errors import CheckpointError, UserError
from tests.helpers import BACKENDS, result_of, run, train_resumable

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["folder", "file://", "memory://"])
def place(request, tmp_path):
    if request.param != "memory://":
        return f"{request.param.removeprefix('folder')}{tmp_path}/new/place"
    return f"memory://{tmp_path}/new/place"


def some(step, size=7):
    return Checkpoint(arrays={"model/kernel": np.full((size, size), step, "float32")}, state={"step": step})


def damage(place, name):
    if "://" not in place:
        os.truncate(os.path.join(place, name), 100)
        return
    system, path = fsspec.core.url_to_fs(place)
    content = system.cat_file(f"{path}/{name}")
    system.pipe_file(f"{path}/{name}", content[:100])


def test_what_is_written_is_kept_listed_and_read(place):
    told = []
    writer = files.Writer(place, 2, told.append)
    for step in range(1, 5):
        writer.write(some(step), is_best=step == 2)
    writer.close()
    assert sorted(folder_at(place).names()) == [
        "best.safetensors", "step-00000003.safetensors", "step-00000004.safetensors",
    ]  # fmt: skip
    assert files.load(f"{place}/best.safetensors").state["step"] == 2
    path, found = files.load_newest(place, told.append)
    assert (path, writer.last_good, found.state) == (files.path_of(place, 4), path, {"step": 4})
    np.testing.assert_array_equal(found.arrays["model/kernel"], some(4).arrays["model/kernel"])
    assert not told


def test_what_is_damaged_is_left_out(place):
    for step in (5, 10, 123456789):
        files.save(files.path_of(place, step), some(step))
    damage(place, "step-123456789.safetensors")
    if "://" not in place:
        pathlib.Path(place, "step.safetensors.tmp").write_text("what a killed run began")
    told = []
    path, found = files.load_newest(place, told.append)
    assert path == files.path_of(place, 10) and found.state["step"] == 10
    assert len(told) == 1 and "step-123456789.safetensors is corrupt or truncated" in told[0]
    files.save(files.path_of(place, 15), some(15))
    assert files.load_newest(place, told.append)[0] == files.path_of(place, 15)
    names = [f"step-{step:08d}.safetensors" for step in (5, 10, 15, 123456789)]
    assert sorted(folder_at(place).names()) == sorted(names)
    assert "://" in place or sorted(os.listdir(place)) == sorted(names)


def test_a_place_that_is_new_or_of_an_earlier_run(place):
    assert files.load_newest(place, print) is None
    require_folder(place, resume=False)
    assert not folder_at(place).names()  # what was tried is removed
    files.save(files.path_of(place, 3), some(3))
    require_folder(place, resume=True)
    with pytest.raises(UserError) as caught:
        require_folder(place, resume=False)
    assert f"--checkpoint_dir: {place!r} holds the checkpoints of an earlier run; resume it" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "missing", "words"),
    [
        ("s3://bucket/run", "fsspec", "install fsspec and the package of its protocol: pip install 'kerasdp[fsspec]'"),
        ("s3://bucket/run", "s3fs", "cannot use 's3://bucket/run' (ImportError: Install s3fs"),
        ("nowhere://bucket/run", None, "cannot use 'nowhere://bucket/run' (ValueError: Protocol not known: nowhere"),
        ("ftp://127.0.0.1:1/run", None, "cannot use 'ftp://127.0.0.1:1/run' (ConnectionRefusedError: "),
        ("file:///proc/run", None, "--checkpoint_dir: cannot use 'file:///proc/run' ("),
        ("/proc/run", None, "--checkpoint_dir: cannot use '/proc/run' ("),
        (f"{__file__}/run", None, "--checkpoint_dir: cannot use '"),
    ],
)
def test_a_place_that_cannot_be_used(url, missing, words, monkeypatch):
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError) as caught:
        require_folder(url, resume=True)
    assert words in str(caught.value) and url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_workdir_with_checkpoints_is_refused(tmp_path):
    workdir = tmp_path / "runs" / "new"
    require_folder(str(workdir), False, "workdir", "checkpoints")
    files.save(files.path_of(str(workdir / "checkpoints"), 3), some(3))
    with pytest.raises(UserError, match="--workdir: .* holds the checkpoints of an earlier run; resume it"):
        require_folder(str(workdir), False, "workdir", "checkpoints")


def test_what_is_out_of_reach_is_not_corrupt(tmp_path, monkeypatch):
    """A network that fails must not cost a sound checkpoint, for which an older one would be taken."""
    place = f"memory://{tmp_path}"
    for step in (1, 2):
        files.save(files.path_of(place, step), some(step))

    def fail(*_, **__):
        raise ConnectionResetError("the other end is gone")

    with monkeypatch.context() as patch:
        patch.setattr(fsspec.get_filesystem_class("memory"), "get_file", fail)
        with pytest.raises(UserError, match="--resume: cannot read memory://.*step-00000002.* the other end is gone"):
            files.load_newest(place, print)
    with pytest.raises(CheckpointError, match="step-00000003"):  # that is not there
        files.load(files.path_of(place, 3))
    assert len(folder_at(place).names()) == 2


def test_a_run_continues_without_checkpoints_when_the_place_is_lost(tmp_path, monkeypatch):
    told = []
    place = f"memory://{tmp_path}"
    writer = files.Writer(place, 2, told.append)
    writer.write(some(1))
    writer.wait()

    def fail(*_, **__):
        raise RuntimeError("503 of a package's own kind")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", fail)
    writer.write(some(2))
    writer.write(some(3))
    writer.close()
    assert len(told) == 1
    assert f"cannot write checkpoints into {place} (RuntimeError: 503 of a package's own kind); training" in told[0]
    assert told[0].endswith(f"the last good one is {files.path_of(place, 1)}")
    assert folder_at(place).names() == ["step-00000001.safetensors"]


KILLED = """
import os, signal, sys
import fsspec
from fsspec.implementations.local import LocalFileSystem
from kerasdp.checkpoint import files
from tests.checkpoint.test_storage import some

class Slow(LocalFileSystem):
    protocol = "slow"

    def put_file(self, source, target, **options):
        if os.path.exists(os.path.join(sys.argv[1], "step-00000001.safetensors")):
            with open(source, "rb") as whole, open(self._strip_protocol(target), "wb") as half:
                half.write(whole.read(os.path.getsize(source) // 2))
            os.kill(os.getpid(), signal.SIGKILL)
        super().put_file(source, target, **options)

fsspec.register_implementation("slow", Slow)
for step in (1, 2):
    files.save(files.path_of("slow://" + sys.argv[1], step), some(step, 100))
"""


def test_one_that_is_killed_leaves_no_half(tmp_path):
    """On a file system where an upload is seen while it grows."""
    place = tmp_path / "place"
    done = run("-c", KILLED, place, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert sorted(os.listdir(place)) == ["step-00000001.safetensors", "step.safetensors.tmp"]
    url = f"file://{place}"
    assert folder_at(url).names() == ["step-00000001.safetensors"]
    path, found = files.load_newest(url, lambda text: pytest.fail(text))
    assert found.state["step"] == 1
    files.save(files.path_of(url, 2), some(2))
    assert files.load_newest(url, lambda text: pytest.fail(text))[1].state["step"] == 2


def test_a_second_fit_has_a_place_of_its_own():
    config = Config(workdir="runs/a", checkpoint_dir="s3://bucket/run")
    assert [config.checkpoints_of_fit(number) for number in (1, 2)] == ["s3://bucket/run", "s3://bucket/run/fit-2"]
    assert Config(workdir="runs/a").checkpoints_of_fit(2) == "runs/a/fit-2/checkpoints"
    assert Config(checkpoint_dir="b").checkpoints_of_fit(1) == "b"
    assert Config(workdir="runs/a", checkpoint_every="never").checkpoints_of_fit(1) is None


@pytest.mark.proof
def test_a_run_resumes_from_a_url_in_another_workdir(tmp_path):
    """Where nothing but the checkpoints is left."""
    name, url = BACKENDS[0], f"file://{tmp_path}/place"
    whole = result_of(train_resumable(tmp_path / "whole", name, 1, checkpoint_every="never", epochs=2))
    choices = {"checkpoint_dir": url, "epochs": 2}
    done = train_resumable(tmp_path / "first", name, 1, trouble="signal", at_step=17, **choices)
    assert done.returncode == 99 and f"saved in {url}/step-000000" in done.stderr
    assert not (tmp_path / "first" / "checkpoints").exists()
    again = train_resumable(tmp_path / "second", name, 1, **choices)
    assert again.returncode == 2 and "holds the checkpoints of an earlier run" in again.stderr
    result = result_of(train_resumable(tmp_path / "second", name, 1, resume=True, **choices))
    assert result == whole
    assert (tmp_path / "place" / "step-00000020.safetensors").exists()
