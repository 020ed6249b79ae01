"""One word for one thing: words that this project does not use, and those it writes instead."""

import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# What is not written (a regular expression, which begins and ends at a word's border), and what is written instead.
WORDS = {
    # What users do.
    r"(go|goes|going|went|gone) on": "resume, continue",
    r"passed.over|PASSED_OVER|passed_over\w*": "skipped",
    r"behind (the|each|its|every|this|that|a) (step|epoch|batch)|behind (every )?(\d+ )?steps?": "after the step",
    r"in few passes|in fewer passes": "fused",
    r"cut off": "truncated (a file), removed (padding)",
    r"anew|whoever|of one's own": "again, who, custom",
    # Comparing two trainings.
    r"parts? from|parting|[Pp]artings?|(two|runs|trainings) part": "diverge, divergent, divergence",
    # Arrays and devices.
    r"drop_detours|detours": "round trips",
    r"(each replica|this process)'s part|parts? of (the|a) (global )?batch": "shard",
    r"equal parts": "equal shards",
    # Whose it is.
    r"the user's own|of the user's|of (the )?kit's own|the kit's own|of Keras' own losses": "user-defined, built-in",
}
PLACES = ("kerasdp", "recipes", "flags", "benchmarks", "docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@functools.cache
def written():
    """All files that people read, as (name, text)."""
    found = []
    for place in PLACES:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.suffix in (".py", ".md", ".flags"):
                found.append((file.relative_to(ROOT), file.read_text()))
    return found


def found(word):
    spaces = word.replace(" ", r"[\s#]+")
    pattern = re.compile(rf"(?<!\w)(?:{spaces})(?!\w)")
    for name, text in written():
        for match in pattern.finditer(text):
            yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_is_not_used(word):
    places = list(found(word))
    assert not places, f"write {WORDS[word]} instead: " + "; ".join(places)
