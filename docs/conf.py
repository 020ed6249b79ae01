"""Builds the site of the documentation: python -m sphinx -W docs build/site."""

import pathlib
import re
import tomllib

DOCS = pathlib.Path(__file__).resolve().parent

project, author = "kerasdp", "the authors of kerasdp"
release = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["version"]
project_copyright = "the authors of kerasdp, Apache-2.0"
root_doc = "index"
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme, html_title, html_show_sphinx = "furo", "kerasdp", False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
templates_path: list[str] = []
# Headings have the anchors that they have on GitHub.
myst_heading_anchors = 5
copybutton_exclude = ".linenos, .gp, .go"


def _entries(beginning: str, listed: list[str]) -> str:
    """Returns the lines of a navigation for the pages whose names begin so, and are not listed by name."""
    names = sorted(page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.glob(f"{beginning}*.md"))
    return "".join(f"{name}\n" for name in names if name not in listed)


def _complete(app: object, page: str, source: list[str]) -> None:
    """Lists the pages of a folder; a link that leaves docs/ becomes the file's name in the repository."""
    text = source[0]
    text = re.sub(r"^([\w/-]+)\*\n", lambda entry: _entries(entry[1], text.splitlines()), text, flags=re.MULTILINE)
    folder = (DOCS / page).parent

    def named(link: re.Match[str]) -> str:
        label, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(DOCS):
            return link[0]
        inside = f"`{path.relative_to(DOCS.parent)}`"
        return inside if label.strip("`") in inside else f"{label} ({inside})"

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", named, text)


def setup(app: object) -> None:
    """Is called by Sphinx."""
    app.connect("source-read", _complete)  # type: ignore[attr-defined]
