"""How many choices, public names, members of a strategy and lines of code there are: the numbers fall."""

import dataclasses
import io
import tokenize

import kerasdp
from kerasdp.config import Config
from kerasdp.contract import Strategy
from tests.helpers import ROOT

# After a change that takes something out, write the new number. One that raises a number names its reason in the same
# commit, and in a comment here.
CHOICES = 28
PUBLIC_NAMES = 25
LINES_OF_CODE = 14870
# Methods and attributes of what a backend must be.
MEMBERS_OF_STRATEGY = 12

BESIDE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(text):
    """Lines with a token other than a comment, without docstrings, which are strings where a statement begins."""
    used, before = set(), tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        if token.type not in BESIDE and not is_docstring:
            used |= set(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return len(used)


def test_choices_of_a_run():
    assert len(dataclasses.fields(Config)) <= CHOICES


def test_members_of_a_strategy():
    members = {name for name in (*vars(Strategy), *Strategy.__annotations__) if not name.startswith("_")}
    assert len(members) <= MEMBERS_OF_STRATEGY


def test_public_names():
    assert len(kerasdp.__all__) <= PUBLIC_NAMES


def test_lines_of_the_package():
    files = (ROOT / "kerasdp").rglob("*.py")
    assert sum(lines_of_code(path.read_text()) for path in files) <= LINES_OF_CODE
