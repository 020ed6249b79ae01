"""How many choices of a run, public names and lines of code there are: the numbers fall, or a commit says why not."""

import ast
import dataclasses
import io
import tokenize

import kerasdp
from kerasdp.config import Config
from tests.helpers import ROOT

# After a change that takes something out, write the new number. One that raises a number names its reason in the same
# commit, and in a comment here.
CHOICES = 34
PUBLIC_NAMES = 26
LINES_OF_CODE = 17039

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BESIDE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(text):
    """Lines with a token other than a comment, without docstrings."""
    docstrings, used = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in BESIDE:
            used |= set(range(token.start[0], token.end[0] + 1))
    return len(used - docstrings)


def test_choices_of_a_run():
    assert len(dataclasses.fields(Config)) <= CHOICES


def test_public_names():
    assert len(kerasdp.__all__) <= PUBLIC_NAMES


def test_lines_of_the_package():
    files = (ROOT / "kerasdp").rglob("*.py")
    assert sum(lines_of_code(path.read_text()) for path in files) <= LINES_OF_CODE
