"""Two runs never write their checkpoints to one folder: the second is told in one line."""

import os

import pytest

import kerasdp
from kerasdp.errors import UserError
from tests.config.test_workdir_lock import holder


def test_a_folder_of_checkpoints_is_locked(tmp_path):
    """Whatever the workdirs of the two runs are."""
    place = tmp_path / "checkpoints"
    place.mkdir()
    other = holder(place)
    with pytest.raises(UserError, match=f"--checkpoint_dir: .* is in use by another run .process {other.pid} on "):
        kerasdp.launch(print, num_devices=1, workdir=str(tmp_path / "own"), checkpoint_dir=str(place))
    other.kill()
    other.wait()
    seen = kerasdp.launch(lambda runner: os.listdir(place), num_devices=1, checkpoint_dir=str(place))
    assert seen == [".lock"]


def test_a_folder_that_is_the_workdir_is_locked_once(tmp_path):
    both = {"checkpoint_dir": str(tmp_path), "workdir": f"{tmp_path}/./"}
    assert kerasdp.launch(lambda runner: 7, num_devices=1, backend="torch", **both) == 7
