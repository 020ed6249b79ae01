"""A program defines flags by absl; `kerasdp.flags` adds the arguments of `kerasdp.launch`."""

import re

import pytest

from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from tests.helpers import BACKENDS, PROGRAMS, result_of, run

PROGRAM = PROGRAMS / "own_flags.py"


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_workers_have_the_values_of_the_command_line(count, tmp_path):
    flags = ("--device=cpu", f"--gpus={count}", "--learning_rate=0.5", "--sizes=5,6", f"--workdir={tmp_path}/run")
    found = result_of(run(PROGRAM, f"--backend={BACKENDS[0]}", *flags, cwd=tmp_path))
    assert found["flags"] == [16, ["5", "6"], 0.5, count, None]
    assert found["config"] == [16, "float64", f"{tmp_path}/run", count]


def test_help_lists_all_flags():
    """The flags of the program, and the arguments of `launch`."""
    text = run(PROGRAM, "--help").stdout
    listed = set(re.findall(r"^  --(?:\[no\])?(\w+): ", text, re.M))
    assert listed == {known.flag for known in choices_of(Config).values()} | {"learning_rate", "sizes"}


@pytest.mark.parametrize(
    ("flag", "code", "words"),
    [
        ("--gpu=2", 1, "Unknown command line flag 'gpu'. Did you mean: gpus"),
        ("--model=resnet50", 1, "Unknown command line flag 'model'"),
        ("--gpus=zero", 1, "flag --gpus=zero: invalid literal"),
        ("--precision=float31", 2, "error: --precision: expected one of auto, float32"),
        ("--gpus=32", 2, "error: --batch_size: expected at least 32 samples for 32 devices"),
    ],
)
def test_a_wrong_flag_is_refused(flag, code, words, tmp_path):
    done = run(PROGRAM, flag, cwd=tmp_path)
    assert done.returncode == code and words in done.stderr
    assert "Traceback" not in done.stderr
