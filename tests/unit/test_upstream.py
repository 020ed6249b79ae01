"""The programs for what is wrong upstream are short, plain, and say what docs/matrix.md has of them."""

import json
import re

import pytest

from tests.helpers import BACKENDS, ROOT, run

PROGRAMS = sorted(path for path in (ROOT / "upstream").glob("*.py") if path.stem != "verdicts")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program(path):
    text = path.read_text()
    code = [line for line in text.splitlines() if line and not line.startswith(("#", '"""'))]
    assert len(code) <= 20 and "kerasdp" not in text
    (names,) = re.findall(r"^# backends: (.*)$", text, re.M)
    assert set(names.split(", ")) <= {"torch", "jax", "tensorflow"} and text.startswith('"""')


@pytest.mark.proof
@pytest.mark.parametrize("backend", BACKENDS)
def test_verdicts_are_those_of_the_page(backend):
    """Where one is another, a work-around may go, or a version has moved: run tests/matrix.py."""
    done = run(ROOT / "upstream" / "verdicts.py", f"--backends={backend}", timeout=1500)
    lines = [line[2:-2] for line in done.stdout.splitlines() if line.endswith(" |") and "`" in line]
    rows = [line.split(" | ") for line in lines]
    known = json.loads((ROOT / "docs" / "matrix.json").read_text())["pinned"]["rows"]
    assert len(rows) == len(PROGRAMS)
    for name, *cells in rows:
        expected = known[name][backend][0]
        assert "".join(cells).partition(":")[0] == expected.partition(":")[0], name
