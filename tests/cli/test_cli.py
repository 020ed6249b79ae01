"""The flags of the recipes; whatever is wrong with them is said in few words, without a traceback."""

import json
import re

import pytest

from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from tests.helpers import BACKENDS, PROGRAMS, ROOT, result_of, run

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if "app.run(" in path.read_text())
FLAGFILES = sorted((ROOT / "flags").glob("*.flags"))
OF_FILE = re.compile(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"")


def errors_of(recipe, *lines):
    """What absl says of each list of arguments; None where it takes them."""
    return result_of(run(PROGRAMS / "parse_flags.py", recipe, json.dumps(lines)))


@pytest.mark.short("train", "parity")
@pytest.mark.parametrize("recipe", RECIPES)
def test_help_lists_the_flags_of_the_file(recipe):
    """And of them `kerasdp.flags.define` defines those that the file names, or all."""
    text = run(f"recipes/{recipe}.py", "--help").stdout
    source = (ROOT / "recipes" / f"{recipe}.py").read_text()
    listed = set(re.findall(r"^  (?:-\w,)?--(?:\[no\])?(\w+): ", text, re.M))
    assert listed >= set(OF_FILE.findall(source))
    if "flags.define()" in source:
        assert listed >= {known.flag for known in choices_of(Config).values()}


@pytest.mark.parametrize("recipe", ["train", "pipeline", "from_scratch"])
def test_flagfiles(recipe):
    """Each parses, and its header tells the command, the expected result and time, and where they were measured."""
    of_recipe = {"pipeline": "pipeline", "lesson": "from_scratch"}
    files = [file for file in FLAGFILES if of_recipe.get(file.stem.partition("_")[0], "train") == recipe]
    assert errors_of(recipe, *([f"--flagfile={file}"] for file in files)) == [None] * len(files) != []
    for file in files:
        header = " ".join(line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#"))
        for word in (f"python recipes/{recipe}.py --flagfile=flags/{file.name}", "Expected:", "Measured on:"):
            assert word in header


@pytest.mark.parametrize(
    ("recipe", "flags", "code", "words"),
    [
        ("train", "--batchsize=3", 1, "Unknown command line flag 'batchsize'. Did you mean: batch_size"),
        ("train", "--epochs=0", 1, "flag --epochs=0: 0 is not a positive integer"),
        ("train", "--flagfile=/nowhere/none.flags", 1, "none.flags"),
        ("train", "stray", 2, "error: expected flags only. Received: 'stray'"),
        ("train", "--resume", 2, "add --workdir=FOLDER"),
        ("parity", "--device_counts=1,two", 1, "expected, for example 1,2,4"),
        ("parity", "--gpus=2", 1, "Unknown command line flag 'gpus'"),
        ("pipeline", "--repetitions=1", 1, "flag --repetitions=1: 1 is not integer >= 2"),
        ("from_scratch", "--precision=bfloat16", 2, "error: --precision: expected float32 or float64"),
        ("predict", "--output=a.txt --checkpoint=a", 1, "flag --output=a.txt: expected a .npy or .csv file"),
        ("predict", "--gpus=2", 1, "Flag --checkpoint must have a value other than None"),
        ("export", "--checkpoint=m.keras", 1, "Flag --to must have a value other than None"),
        ("finetune", "--preset=a --weights=b", 2, "error: --preset and --weights both name the model"),
        ("finetune", "--weights=b", 2, "together with --weights or --preset"),
    ],
)
def test_wrong_flags(recipe, flags, code, words, tmp_path):
    done = run(ROOT / "recipes" / f"{recipe}.py", *flags.split(), cwd=tmp_path, backend=BACKENDS[0])
    assert done.returncode == code and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
