"""The pages say what is there: links lead somewhere, code compiles, commands parse, error texts are the code's."""

import ast
import collections
import importlib.util
import os
import re
import shlex
import tomllib

import pytest

import kerasdp
from kerasdp.config import Config
from kerasdp.config.choices import choices_of
from kerasdp.processes.devices import choose_backend
from tests.cli.test_cli import RECIPES, errors_of
from tests.helpers import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.S | re.M)


def without_code(text):
    return FENCE.sub("", text)


def anchors(page):
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", without_code(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{target}: there is no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{target}: there is no such heading"


def test_links():
    broken = {str(page.relative_to(ROOT)): list(broken_links(page)) for page in PAGES}
    assert {name: links for name, links in broken.items() if links} == {}


def test_python_compiles():
    for page in PAGES:
        for language, code in FENCE.findall(page.read_text()):
            if language == "python":
                compile(code, str(page), "exec")


def commands(page):
    """Lines with a recipe of this repository, of blocks of the shell; a line that ends with a backslash continues."""
    for language, code in FENCE.findall(page.read_text()):
        if language == "bash":
            for line in code.replace("\\\n", " ").splitlines():
                if match := re.search(r"python (recipes/(\w+)\.py.*)", line):
                    yield match[2], shlex.split(match[1].partition(" && ")[0], comments=True)


def test_flags_of_commands():
    given = collections.defaultdict(list)
    for page in PAGES:
        for recipe, arguments in commands(page):
            assert os.path.exists(ROOT / arguments[0]), (page, arguments)
            if recipe in RECIPES and "--help" not in arguments:
                given[recipe].append(arguments[1:])
    refused = {recipe: errors_of(recipe, *lines) for recipe, lines in given.items()}
    assert {recipe: [error for error in errors if error] for recipe, errors in refused.items() if any(errors)} == {}


def test_a_wrong_flag_is_found():
    assert "Unknown command line flag 'repetitions'" in errors_of("train", ["--repetitions=2"])[0]


def texts_of_the_code():
    """All strings of the package; what is filled in is `...`."""
    for file in (ROOT / "kerasdp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_error_texts():
    """Each text of the tables is in the code, word by word, between what is filled in."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(quoted) > 20
    texts = "\n".join(texts_of_the_code())
    for quote in quoted:
        pieces = [piece.strip(" ,;:()'") for piece in quote.split("...")]
        missing = [piece for piece in pieces if piece and piece not in texts]
        assert not missing, f"{quote}: {missing}"


def test_every_page_is_in_the_navigation():
    """By its name, or by a name with * that fits it."""
    index = (ROOT / "docs" / "index.md").read_text()
    entries = [line for code in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S) for line in code.splitlines()]
    listed = {path for entry in entries if entry and entry[0] != ":" for path in (ROOT / "docs").glob(f"{entry}.md")}
    assert listed == set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "index.md"}


@pytest.fixture
def conf(monkeypatch):
    """The settings of the site."""
    monkeypatch.setenv("KERAS_BACKEND", "")  # and put back
    spec = importlib.util.spec_from_file_location("conf_of_docs", ROOT / "docs" / "conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return conf


def test_the_table_of_flags(conf):
    """The site has a row for each flag, with its default, zeros as well."""
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \| (.*) \|$", conf._flags(), re.M)
    choices = choices_of(Config).values()
    assert len(rows) == len(choices)
    cells = {names: (default, meaning) for names, default, meaning in rows}
    for choice in choices:
        assert choice.help.partition("--")[0].partition("*")[0] in cells[f"`--{choice.flag}`"][1]
    defaults = {names: default for names, (default, _) in cells.items()}
    assert [defaults[f"`--{flag}`"] for flag in ("seed", "max_restarts", "keep")] == ["`0`", "`0`", "`3`"]
    assert defaults["`--gpus`"] == "all GPUs or TPUs, or 1" and defaults["`--resume`"] == ""


def test_the_settings_of_the_site():
    """Flags and public names come into the pages, whatever there is of them."""
    for name, place in (("command-line.md", "<!-- flags -->"), ("api.md", "<!-- api -->")):
        assert place in (ROOT / "docs" / name).read_text()
    assert "python -m sphinx -W" in (ROOT / ".ci" / "run").read_text()


def test_the_site_is_built_with_any_backend(conf):
    """Keras alone would take TensorFlow, which need not be installed; `.[docs]` brings a backend."""
    assert os.environ["KERAS_BACKEND"] == choose_backend(None)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "kerasdp[jax]" in extras["docs"]


def test_the_interface_in_groups(conf):
    """Each public name is in a group, with a heading to which the table leads; `launch` comes first."""
    text = conf._api()
    linked = re.findall(r"^\| \[`(\w+)`\]\(#kerasdp(\w+)\) \| \w.*\|$", text, re.M)
    headings = re.findall(r"^### kerasdp\.(\w+)$", text, re.M)
    assert [name for name, _ in linked] == headings and sorted(headings) == sorted(kerasdp.__all__)
    assert all(anchor == name.lower() for name, anchor in linked) and headings[0] == "launch"


@pytest.mark.parametrize("words", ["mixed precision", "gradient clipping"])
def test_the_search_finds(words):
    """What people search for is a heading somewhere."""
    assert [page for page in PAGES if re.search(rf"^#+ .*{words}", page.read_text(), re.M | re.I)]
