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


def _rename_links(app: object, page: str, source: list[str]) -> None:
    """Replaces a link that leaves docs/ by the file's name in the repository."""
    folder = (DOCS / page).parent

    def named(link: re.Match[str]) -> str:
        label, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if path.is_relative_to(DOCS):
            return link[0]
        inside = f"`{path.relative_to(DOCS.parent)}`"
        return inside if label.strip("`") in inside else f"{label} ({inside})"

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)]+)\)", named, source[0])


def setup(app: object) -> None:
    """Is called by Sphinx."""
    app.connect("source-read", _rename_links)  # type: ignore[attr-defined]
