"""Builds the site of the documentation: python -m sphinx -W docs build/site."""

import inspect
import itertools
import os
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # the API pages import Keras, which needs no GPU

import kerasdp  # noqa: E402
from kerasdp.config.choices import choices_of  # noqa: E402
from kerasdp.processes.devices import choose_backend  # noqa: E402

os.environ["KERAS_BACKEND"] = choose_backend(None)  # without it Keras takes TensorFlow, installed or not

project, author, release = "kerasdp", "the authors of kerasdp", kerasdp.__version__
project_copyright = "the authors of kerasdp, Apache-2.0"
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme, html_title, html_show_sphinx = "furo", "kerasdp", False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
templates_path: list[str] = []
# Headings have the anchors that they have on GitHub.
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_custom_sections = [("Args that mean more than in Keras", "params_style")]
default_role = "code"
copybutton_exclude = ".linenos, .gp, .go"


def _flags() -> str:
    """Returns the flags that `kerasdp.flags.define` defines, in their groups, as tables."""
    lines = []
    for group, choices in itertools.groupby(choices_of(kerasdp.Config).values(), lambda one: one.group):
        lines += [f"### {group}", "", "| flag | default | meaning |", "|---|---|---|"]
        for choice in choices:
            default, meaning = choice.default_text, choice.help
            if default and choice.default is not None:
                default = f"`{default}`"
            lines.append(f"| `--{choice.flag}` | {_cell(default)} | {_cell(meaning)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Returns a text as a cell of a table, its flags as code."""
    text = re.sub(r"(?<![\w-])(--[a-z]\w+(?:=[\w.,]+)?)", r"`\1`", text).replace("|", "\\|")
    return re.sub(r"(?<!`)\*", "\\\\*", text)


# The public names, as the page of the interface shows them.
API = {
    "Runs": ["launch", "Runner", "Config", "local_devices", "UserError", "RunError", "PreemptedError"],
    "Data": ["load_data", "Dataset", "ArraySource", "RecordSource", "Order"],
    "Models and training": [
        "build_model", "load_backbone", "make_optimizer",
        "portable", "layers", "per_sample", "all_rows", "value_and_grad",
    ],
    "Trained models": ["load_model", "export"],
    "Measuring": ["parity", "pipeline"],
    "Recipes": ["flags"],
}  # fmt: skip


def _api() -> str:
    """Returns a table of the public names in their groups, then a directive for each of them."""
    grouped = [name for names in API.values() for name in names]
    if sorted(grouped) != sorted(kerasdp.__all__):
        raise ValueError(f"API: expected each public name once. Differ: {set(grouped) ^ set(kerasdp.__all__)}")
    lines = ["| | |", "|---|---|"]
    for group, names in API.items():
        lines.append(f"| **{group}** | |")
        for name in names:
            summary = str(inspect.getdoc(getattr(kerasdp, name))).partition("\n")[0].partition(". ")[0].rstrip(".")
            lines.append(f"| [`{name}`](#kerasdp{name.lower()}) | {_cell(summary)} |")
    for group, names in API.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += ["", f"### kerasdp.{name}", "", "```{eval-rst}", *_directives(name), "```"]
    return "\n".join(lines)


def _directives(name: str) -> list[str]:
    """Returns the lines of a public name's directive; of a package those of its public names, too."""
    value = getattr(kerasdp, name)
    if not inspect.ismodule(value):
        return _directive(f"kerasdp.{name}", value)
    lines = [f".. automodule:: {value.__name__}", ""]
    for inner in getattr(value, "__all__", [n for n in vars(value) if not n.startswith("_")]):
        lines += _directive(f"{value.__name__}.{inner}", getattr(value, inner))
    return lines


def _directive(path: str, value: object) -> list[str]:
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:", "   :exclude-members: __init__, __new__", ""]
    return [f".. autofunction:: {path}", ""] if callable(value) else []


def _entries(beginning: str, listed: list[str]) -> str:
    """Returns the lines of a navigation for the pages whose names begin so, and are not listed by name."""
    names = sorted(page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.glob(f"{beginning}*.md"))
    return "".join(f"{name}\n" for name in names if name not in listed)


def _complete(app: object, page: str, source: list[str]) -> None:
    """Fills in what is made of the code; a link that leaves docs/ becomes the file's name in the repository."""
    text = source[0].replace("<!-- flags -->", _flags() if "<!-- flags -->" in source[0] else "")
    text = text.replace("<!-- api -->", _api() if "<!-- api -->" in source[0] else "")
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


def _examples_as_code(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Turns the ```python blocks of a docstring, the form of Keras' documentation, into directives of Sphinx."""
    indent = None
    for number, line in enumerate(lines):
        if line.strip() == "```python":
            indent = line[: len(line) - len(line.lstrip())]
            lines[number] = f"{indent}.. code-block:: python\n"
        elif line.strip() == "```" and indent is not None:
            lines[number], indent = "", None
        elif indent is not None and line:
            lines[number] = f"    {line}"
    lines[:] = "\n".join(lines).split("\n")


def setup(app: object) -> None:
    """Is called by Sphinx."""
    app.connect("source-read", _complete)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", _examples_as_code, priority=400)  # type: ignore[attr-defined]  # before napoleon
