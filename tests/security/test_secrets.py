"""Passwords and tokens in URLs stand in no file, no line and no error."""

import dataclasses
import json
import os

import numpy as np
import pytest

from kerasdp.checkpoint import files
from kerasdp.checkpoint.storage import OutOfReachError, folder_at, require_folder
from kerasdp.config import Config
from kerasdp.errors import RunError, UserError, redacted
from kerasdp.reporting import report
from kerasdp.reporting.report import Facts
from tests.helpers import BACKENDS, PROGRAMS, run

fsspec = pytest.importorskip("fsspec")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ftp://bob:hunter2@host/run", "ftp://***@host/run"),
        ("s3://KEY:SEC/RET@bucket/run", "s3://***@bucket/run"),
        ("cannot use 'https://ghp_token@host/a?sig=abc&x=1' (no)", "cannot use 'https://***@host/a?***' (no)"),
        ("simplecache::ftp://bob:hunter2@host/run", "simplecache::ftp://***@host/run"),
        ("ftp://bob:hun@ter2@host/run, s3://a:b@c", "ftp://***@host/run, s3://***@c"),
        ("s3://bucket/run@2/step-1", "s3://bucket/run@2/step-1"),
        ("mail bob@host; http://host:80/a", "mail bob@host; http://host:80/a"),
    ],
)
def test_a_url_is_shown_without_its_password(text, expected):
    assert redacted(text) == str(RunError(text)) == expected


def test_what_another_program_says_of_a_password(capsys):
    assert redacted("530 login of hunter2 is wrong", "ftp://bob:hunter2@host/run") == "530 login of *** is wrong"
    report.warn("cannot write into ftp://bob:hunter2@host/run")
    assert capsys.readouterr().err == "warning: cannot write into ftp://***@host/run\n"


@pytest.mark.parametrize("url", ["ftp://bob:hunter2@127.0.0.1:1/run", "nowhere://bob:hunter2@host/run"])
def test_a_place_out_of_reach_is_named_without_its_password(url):
    with pytest.raises(UserError, match="://\\*\\*\\*@") as caught:
        require_folder(url, resume=True)
    assert "hunter2" not in str(caught.value)


def test_what_a_file_system_says_is_shown_without_its_password(monkeypatch):
    def fail(*_, **__):
        raise ConnectionResetError("hunter2 was refused by memory://bob:hunter2@host")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "ls", fail)
    with pytest.raises(OutOfReachError) as caught:
        folder_at("memory://bob:hunter2@host/run").names()
    assert "hunter2" not in str(caught.value)


def test_a_run_leaves_no_password(tmp_path):
    """In no file of its own and no line; and it resumes with the URL that the user typed."""
    place = tmp_path / "bob:hunter2@there" / "run"
    backend = BACKENDS[0]
    settings = {"backend": backend, "num_devices": 1, "workdir": str(tmp_path / "run"), "epochs": 1, "verbose": 2}
    settings["checkpoint_dir"] = "local://bob:hunter2@there/run"  # to fsspec a folder of that name, here
    for changes in ({}, {"resume": True, "epochs": 2}):
        done = run(PROGRAMS / "resume.py", json.dumps(settings | changes), backend=backend, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "hunter2" not in done.stdout + done.stderr
    path, found = files.load_newest(str(place), print)
    assert found.state["config"]["checkpoint_dir"] == "local://***@there/run"
    for folder in (tmp_path / "run", place):
        for each in folder.rglob("*"):
            assert not each.is_file() or b"hunter2" not in each.read_bytes()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["checkpoint_dir"] == "local://***@there/run"
    assert found.state["epoch"] == 2 and os.path.basename(path) == "step-00000020.safetensors"


def test_trackers_get_no_password(tmp_path, monkeypatch):
    given = Config(checkpoint_dir="s3://KEY:SECRET@bucket", workdir=str(tmp_path), batch_size=np.int64(8).item())
    assert given.checkpoint_dir == "s3://KEY:SECRET@bucket"
    assert "SECRET" not in json.dumps(given.as_dict()) and "s3://***@bucket" in json.dumps(given.as_dict())
    facts = Facts(**dict.fromkeys((field.name for field in dataclasses.fields(Facts)), ()) | {"config": given})
    assert facts.choices["checkpoint_dir"] == "s3://***@bucket"
