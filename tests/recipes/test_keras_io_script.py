"""A Keras script becomes one for several devices by the diff in docs/quickstart.md."""

import json
import re

import pytest

from tests.helpers import BACKENDS, PROGRAMS, ROOT, run

CALLS = [(backend, count) for backend in BACKENDS for count in (1, 2)]
USUAL = ("jax", 2)  # the quickest


def changed_script(folder):
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "quickstart.md").read_text(), re.DOTALL)
    text, added = (PROGRAMS / "keras_io_script.py").read_text(), 0
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert text.count(before) == 1, before
        text, added = text.replace(before, after), added + sum(line[0] == "+" for line in lines)
    assert added <= 5
    script = folder / "my_script.py"
    script.write_text(text)
    return script


def losses(folder, backend, count):
    script = changed_script(folder)
    if count == 1:
        script.write_text(script.read_text().replace("num_devices=2", "num_devices=1"))
    done = run(script, backend=backend, cwd=folder, KERAS_BACKEND=backend, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert done.stdout.count("Validation accuracy") == done.stdout.count("Losses:") == 1, done.stdout
    assert (folder / "best.keras").is_file() and list((folder / "logs").rglob("events.*"))
    return json.loads(done.stdout.rpartition("Losses: ")[2])


@pytest.mark.proof
def test_on_two_devices(tmp_path):
    found = losses(tmp_path, *USUAL)
    assert len(found) == 3 and found[2] < found[1] < found[0]


@pytest.mark.proof
def test_the_same_on_each_backend_and_count(tmp_path):
    found = {}
    for backend, count in CALLS:
        folder = tmp_path / f"{backend}-{count}"
        folder.mkdir()
        found[backend, count] = losses(folder, backend, count)
    for call in CALLS:
        assert found[call] == pytest.approx(found[USUAL], abs=1e-5), found
