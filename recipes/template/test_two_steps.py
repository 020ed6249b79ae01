"""Tests that each recipe of this folder has the same losses on one and on two CPU devices.

It trains two steps. Run it:

    pip install -e '.[test]' && python -m pytest
"""

import json
import pathlib
import subprocess
import sys

import pytest

THIS = pathlib.Path(__file__)
FOLDER = THIS.parent
RECIPES = sorted(path.name for path in FOLDER.glob("*.py") if "app.run(" in path.read_text() and path != THIS)


def losses_on(num_devices, recipe, workdir):
    """Trains a recipe for two steps and returns the loss of each step."""
    flags = [f"--gpus={num_devices}", "--device=cpu", "--max_steps=2", "--log_every=1", f"--workdir={workdir}"]
    subprocess.run([sys.executable, FOLDER / recipe, *flags], check=True)
    return [json.loads(line)["loss"] for line in (workdir / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_devices_learn_what_one_learns(recipe, tmp_path):
    one, two = (losses_on(count, recipe, tmp_path / str(count)) for count in (1, 2))
    assert len(one) == 2 and two == pytest.approx(one, rel=1e-5)
