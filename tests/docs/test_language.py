"""Pages, flag help, public docstrings and errors have short sentences, without constructions that are hard to read."""

import pytest

from tests import language

LONG = " ".join(["word"] * 30)
OWN = "Write a loop of your own."


def test_no_sentence_breaks_a_rule():
    """If one does: python -m tests.language."""
    assert list(language.faults()) == []


@pytest.fixture
def faults_of(tmp_path, monkeypatch):
    """Returns the faults of a page and of a package that has an error with this text."""

    def found(page, error="use a cat"):
        (tmp_path / "page.md").write_text(page)
        (tmp_path / "kerasdp").mkdir()
        (tmp_path / "kerasdp" / "module.py").write_text(f"raise UserError({error!r})\n")
        monkeypatch.setattr(language, "ROOT", tmp_path)
        monkeypatch.setattr(language, "PAGES", [tmp_path / "page.md"])
        return list(language.faults())

    return found


def test_a_plain_page_has_no_fault(faults_of):
    assert faults_of(f"# A page\n\nA cat sat on a mat. Then it ran.\n\n```text\n{OWN}\n```\n") == []


@pytest.mark.parametrize("place", ["A cat sat. {}", "- A cat sat: {}", "A cat\nsat.\n{}"])
def test_a_long_sentence_is_found(faults_of, place):
    (fault,) = faults_of(place.format(LONG.capitalize() + "."))
    assert fault.startswith("page.md: 30 words: Word word")


def test_a_construction_is_found(faults_of):
    (fault,) = faults_of(f"A cat sat on a mat. {OWN}")
    assert fault == f"page.md: 'of your own', write: custom, or leave it out: {OWN}"


def test_errors_are_read(faults_of):
    long, own = faults_of("A cat sat.", f"{LONG}; use a loop of your own")
    assert long.startswith("kerasdp/module.py:1: 30 words") and "'of your own'" in own
