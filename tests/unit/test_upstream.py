"""The programs for what is wrong upstream are short, plain, and say what docs/contributing/matrix.md has of them."""

import re

import pytest

from tests.helpers import ROOT, run

PROGRAMS = sorted(path for path in (ROOT / "upstream").glob("*.py") if path.stem != "verdicts")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program(path):
    text = path.read_text()
    code = [line for line in text.splitlines() if line and not line.startswith(("#", '"""'))]
    assert len(code) <= 20 and "kerasdp" not in text
    (names,) = re.findall(r"^# backends: (.*)$", text, re.M)
    assert set(names.split(", ")) <= {"torch", "jax", "tensorflow"} and text.startswith('"""')


@pytest.mark.proof
def test_verdicts_are_those_of_the_page(backend):
    """Where one is another, a work-around may go, or a version has moved: put it into the page."""
    done = run(ROOT / "upstream" / "verdicts.py", f"--backends={backend}", timeout=1500)
    pinned = (ROOT / "docs" / "contributing" / "matrix.md").read_text().split("\n## ")[1]
    place = ("torch", "jax", "tensorflow").index(backend)
    found, known = rows_of(done.stdout), rows_of(pinned)
    assert len(found) == len(PROGRAMS)
    for name, cells in found.items():
        assert cells[0].partition(":")[0] == known[name][place].partition(":")[0], name


def rows_of(text):
    """The cells of a table of verdicts, by the name of the row."""
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.endswith(" |") and "`" in line]
    return {name: cells for name, *cells in rows}
