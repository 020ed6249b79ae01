"""The pages say what is there: links lead somewhere, code compiles, commands parse, error texts are the code's."""

import ast
import collections
import importlib.util
import os
import re
import shlex

import pytest

import kerasdp
from kerasdp.config import Config
from kerasdp.config.choices import choices_of
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
        if "://" in target:
            if not re.fullmatch(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[\w./#?=&%~-]*)?", target):
                yield f"{target}: no address of the web"
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
    """By its name in five groups, or, for developers, below `How we test`."""
    index = (ROOT / "docs" / "index.md").read_text()
    groups = re.findall(r"```\{toctree\}\n:caption: [^\n]*\n(.*?)```", index, re.S)
    listed = {line for group in groups for line in group.splitlines() if line and line[0] != ":"}
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(groups) == 5 and listed == {name for name in pages if "/" not in name} - {"index"} | {
        "contributing/how-we-test"
    }


def module_in_docs(name):
    spec = importlib.util.spec_from_file_location(f"{name}_of_docs", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_flags_and_names_are_those_of_the_code():
    """If not: python docs/generate.py."""
    generate = module_in_docs("generate")
    for page, text in (("flags.md", generate.flags_page()), ("api.md", generate.api_page())):
        assert (ROOT / "docs" / page).read_text() == text, page


def test_the_tables_of_flags():
    """A row for each flag of `kerasdp.flags.define` and of each recipe, with its default, zeros as well."""
    rows = re.findall(r"^\| `--(.*?)` \| (.*?) \| (.*) \|$", (ROOT / "docs" / "flags.md").read_text(), re.M)
    defaults = {name: default for name, default, _ in rows}
    assert {known.flag for known in choices_of(Config).values()} | {"trials", "checkpoint", "csv"} <= set(defaults)
    assert [defaults[flag] for flag in ("seed", "max_restarts", "keep")] == ["`0`", "`0`", "`3`"]
    assert defaults["gpus"] == "all GPUs or TPUs, or one CPU device" and defaults["resume"] == "`False`"


def test_the_interface_in_groups():
    """Each public name has a row, which leads to its heading; `launch` comes first."""
    text = (ROOT / "docs" / "api.md").read_text()
    linked = re.findall(r"^\| \[`(\w+)`\]\(#kerasdp(\w+)\) \| \w.*\|$", text, re.M)
    headings = re.findall(r"^### kerasdp\.(\w+)$", text, re.M)
    assert [name for name, _ in linked] == headings and sorted(headings) == sorted(kerasdp.__all__)
    assert all(anchor == name.lower() for name, anchor in linked) and headings[0] == "launch"


def test_the_site_is_built_in_ci():
    assert "python -m sphinx -W" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("words", ["mixed precision", "gradient clipping"])
def test_the_search_finds(words):
    """What people search for is a heading somewhere."""
    assert [page for page in PAGES if re.search(rf"^#+ .*{words}", page.read_text(), re.M | re.I)]
