"""The page of proofs: every file of proofs has a row, runs are written down as they were, slices come to all files."""

import re
import subprocess
import sys

import pytest

from tests import proofs
from tests.helpers import ROOT, environment


def test_every_file_of_proofs_has_a_row():
    marks = re.compile(r"mark\.(proof|short)|all_but\(")
    files = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if marks.search(path.read_text())
    }
    _, rows = proofs.read()
    assert {row.file for row in rows} == files - {"tests/unit/test_proofs.py"}


def test_slices_come_to_all_files_that_may_be_in_one():
    _, rows = proofs.read()
    expected = {row.file for row in rows if row.may_be_in_a_slice}
    seconds = {row.file: row.expected_seconds for row in rows}
    slices = [proofs.slice_of(f"{number:040x}", rows) for number in range(len(expected))]
    assert set().union(*slices) == expected
    assert all(0 < sum(seconds[file] for file in files) <= proofs.SECONDS_OF_A_SLICE for files in slices)


CONFTEST = "from tests.proofs import pytest_addoption, pytest_configure\n"
TESTS = """
import pytest

pytestmark = pytest.mark.proof


@pytest.fixture
def resource():
    yield
    assert {at_the_end}


def test_one(resource):
    assert {first}


@pytest.mark.skipif({is_missing}, reason="not here")
def test_other():
    pass
"""


def record(folder, *flags):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "markers=proof", "--record", *flags]
    env = environment(PYTHONPATH=str(ROOT), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return {row.file: row for row in proofs.read(folder / "docs" / "proofs.md")[1]}, done


@pytest.mark.proof
def test_runs_are_written_down_as_they_were(tmp_path):
    """One that passes; then ones that fail, skip, fail at the end, end early, are partial: they keep what was there."""
    (tmp_path / "docs").mkdir()
    head, _ = proofs.read()
    rows = [proofs.Row(f"test_{name}.py", "2026-01-02", "7", "keras 1", needs="-") for name in ("gone", "old")]
    proofs.write(head, rows, tmp_path / "docs" / "proofs.md")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    usual = {"first": True, "is_missing": False, "at_the_end": True}
    found = {}
    for name, changes in (
        ("old", {}), ("failed", {"first": False}), ("skipped", {"is_missing": True}), ("ended", {"at_the_end": False}),
    ):  # fmt: skip
        (tmp_path / "test_old.py").write_text(TESTS.format(**usual | changes))
        found[name] = record(tmp_path)[0]["test_old.py"]
    passed = found["old"]
    assert passed.passed > "2026-01-02" and (passed.seconds, passed.since) == ("1", "-")
    assert "python 3." in passed.versions and "keras" in passed.versions
    for name, words in (
        ("failed", "1 failed, 1 passed"), ("skipped", "1 passed, 1 skipped"), ("ended", "1 failed, 1 passed"),
    ):  # fmt: skip
        assert found[name].since.endswith(f": {words}"), name
        assert found[name].passed == passed.passed
    (tmp_path / "test_old.py").write_text(TESTS.format(**usual | {"first": False}))
    assert record(tmp_path, "--maxfail=1")[0]["test_old.py"].since.endswith(": interrupted after 0 s")
    (tmp_path / "test_old.py").write_text(TESTS.format(**usual))
    found = record(tmp_path)[0]
    assert found["test_old.py"] == passed
    rows, done = record(tmp_path, "-k", "one")
    assert "1 passed" in done.stdout and rows == found
    assert rows["test_gone.py"].passed == "2026-01-02"
    _, done = record(tmp_path, "test_old.py::test_one")
    assert done.returncode == 4 and "--record: expected whole files" in done.stderr
