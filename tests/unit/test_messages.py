"""Messages name flags to people on the command line, and arguments to people in Python."""

import pickle

import pytest

from kerasdp import errors
from kerasdp.config import Config
from kerasdp.errors import UserError, WorkerError

# As the code has them, and as people in Python read them.
MESSAGES = [
    ("--gpus: there are 2. Received: 4; use --device=cpu", 'num_devices: there are 2. Received: 4; use device="cpu"'),
    ("--seed: expected 2, with --gpus=2 or more", "seed: expected 2, with num_devices=2 or more"),
    ("--learning_rate=0.5; try a lower --learning_rate", "learning_rate=0.5; try a lower learning_rate"),
    ("saved in x; resume with --resume", "saved in x; resume with resume=True"),
    ("--resume: cannot read it", "resume: cannot read it"),
    ("--resume needs a folder: add --workdir=FOLDER", 'resume=True needs a folder: add workdir="FOLDER"'),
    ("pip install -c constraints.txt -e '.[jax]'", "pip install -c constraints.txt -e '.[jax]'"),
    ("--parity-devices, a--b and -- are no flags", "--parity-devices, a--b and -- are no flags"),
]


@pytest.fixture
def in_python(monkeypatch):
    monkeypatch.delenv("KERASDP_FROM_COMMAND_LINE")


@pytest.mark.parametrize(("flags", "arguments"), MESSAGES)
def test_to_whom_a_message_speaks(flags, arguments, monkeypatch):
    assert str(UserError(flags)) == errors.addressed(flags) == flags
    monkeypatch.delenv("KERASDP_FROM_COMMAND_LINE")
    error = UserError(flags)
    assert str(error) == errors.addressed(flags) == arguments
    # It may cross a process border, in either way.
    assert str(pickle.loads(pickle.dumps(error))) == arguments


def test_the_text_of_another_program_stays(in_python):
    text = "rank 1 failed\nusage: --gpus=2"
    assert str(WorkerError(text)) == text


def test_a_message_in_python_names_arguments(in_python):
    with pytest.raises(UserError, match="^num_devices: expected a whole number of at least 1. Received: 0$"):
        Config(num_devices=0)
