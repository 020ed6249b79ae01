"""Writes docs/flags.md and docs/api.md from the code: python docs/generate.py. A test fails if they are stale."""

import ast
import inspect
import itertools
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import kerasdp  # noqa: E402
from kerasdp.config.choices import choices_of  # noqa: E402

FLAGS_PAGE = """\
# Flags

<!-- Written by docs/generate.py. -->

Every recipe that calls `kerasdp.flags.define()` has the flags of the first tables.
`--help` lists the flags of one recipe, with its defaults.

```bash
python recipes/train.py --backend=tensorflow --gpus=2 --nodeterministic
python recipes/train.py --flagfile=flags/lenet_fashion_2gpus.flags --epochs=1
python recipes/train.py --help
```

- `--flagfile=FILE` reads flags from a file, one per line. A later flag wins.
- A switch has two forms: `--resume` and `--noresume`.
- In Python each flag is an argument of `kerasdp.launch` with the same name. Only `--gpus` is called `num_devices`.

| exit code | meaning |
|---|---|
| 0 | the run has ended |
| 1 | the run failed, or there is no such flag |
| 2 | a flag, a file or the data cannot be used |
| 99 | a signal stopped the run, and it saved a checkpoint |
| 130 | Ctrl-C stopped the run |
"""

API_PAGE = """\
# API

<!-- Written by docs/generate.py. -->

All public names of `kerasdp`. The tests run their examples.
`import kerasdp` imports no framework: `launch` chooses the backend.
"""

# The public names, as the page shows them.
API = {
    "Runs": ["launch", "Runner", "Config", "flags", "local_devices", "UserError", "RunError", "PreemptedError"],
    "Data": ["load_data", "Dataset", "ArraySource", "RecordSource", "Order"],
    "Models and training": [
        "build_model", "load_backbone", "make_optimizer",
        "portable", "layers", "per_sample", "all_rows", "value_and_grad",
    ],
    "Trained models": ["load_model", "export"],
    "Measuring": ["parity", "pipeline"],
}  # fmt: skip


def flags_page() -> str:
    """Returns the flags of `kerasdp.flags.define` in their groups, then the flags that each recipe defines itself."""
    lines = [FLAGS_PAGE, "## Flags of every recipe", ""]
    for group, choices in itertools.groupby(choices_of(kerasdp.Config).values(), lambda one: one.group):
        rows = [(one.flag, one.default_text if one.default is None else repr(one.default), one.help) for one in choices]
        lines += _table(group, rows)
    lines += ["## Flags of each recipe", ""]
    for path in sorted((DOCS.parent / "recipes").glob("*.py")):
        if rows := list(_defined(path)):
            lines += _table(f"recipes/{path.name}", rows)
    return "\n".join(lines).rstrip() + "\n"


def _defined(path: pathlib.Path) -> Iterator[tuple[str, str, str]]:
    """Yields the name, default and help of each flag that a recipe defines by absl."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("flags.DEFINE_"):
            name, default, meaning = (ast.literal_eval(argument) for argument in node.args[:3])
            yield name, "" if default is None else repr(default), meaning


def _table(title: str, rows: list[tuple[str, str, str]]) -> list[str]:
    lines = [f"### {title}", "", "| flag | default | meaning |", "|---|---|---|"]
    for name, default, meaning in rows:
        is_value = re.fullmatch(r"'.*'|\[.*\]|[\d.e-]+|True|False", default)
        lines.append(f"| `--{name}` | {f'`{default}`' if is_value else _cell(default)} | {_cell(meaning)} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    """Returns a text as a cell of a table, its flags as code."""
    text = re.sub(r"(?<![\w`-])(--[a-z]\w+(?:=[\w.,]+)?)", r"`\1`", text).replace("|", "\\|")
    return re.sub(r"(?<!`)\*", "\\\\*", text)


def api_page() -> str:
    """Returns a table of the public names in their groups, then what each docstring says."""
    grouped = [name for names in API.values() for name in names]
    if sorted(grouped) != sorted(kerasdp.__all__):
        raise ValueError(f"API: expected each public name once. Differ: {set(grouped) ^ set(kerasdp.__all__)}")
    lines = [API_PAGE, "| | |", "|---|---|"]
    for group, names in API.items():
        lines.append(f"| **{group}** | |")
        for name in names:
            summary = str(inspect.getdoc(getattr(kerasdp, name))).partition("\n")[0].partition(". ")[0].rstrip(".")
            lines.append(f"| [`{name}`](#kerasdp{name.lower()}) | {_cell(summary)} |")
    for group, names in API.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += _described(f"kerasdp.{name}", getattr(kerasdp, name), "###")
    return "\n".join(lines) + "\n"


def _described(path: str, value: Any, heading: str) -> list[str]:
    """Returns the heading, the signature and the docstring of a name; of a class or module its public names, too."""
    lines = ["", f"{heading} {path}", ""]
    if callable(value) and not (inspect.isclass(value) and issubclass(value, Exception)):
        lines += ["```text", _signature(path, value), "```", ""]
    lines += _markdown(inspect.getdoc(value) or "")
    if inspect.ismodule(value):
        for name in value.__all__:
            lines += _described(f"{path}.{name}", getattr(value, name), f"{heading}#")
    elif inspect.isclass(value) and value.__module__.startswith("kerasdp.") and not issubclass(value, Exception):
        for name, member in vars(value).items():
            if not name.startswith("_") and callable(member) and inspect.getdoc(member):
                short = f"{path.removeprefix('kerasdp.')}.{name}"
                lines += _described(short, inspect.unwrap(member), f"{heading}#")
    return lines


def _signature(path: str, value: Any) -> str:
    """Returns a call with the names of its arguments and their defaults, without types."""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for name, each in inspect.signature(value).parameters.items()
        if name != "self"
    ]
    text = f"{path}{inspect.Signature(parameters)}"
    text = re.sub(r"<(?:function|class) '?([\w.]+)'?[^>]*>", lambda found: found[1].rpartition(".")[2], text)
    return textwrap.fill(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _markdown(text: str) -> list[str]:
    """Returns a docstring in the style of Google as Markdown: its sections become lists, examples stay code."""
    lines = []
    parts = re.split(r"^(\w[\w ]*):\n(?=    )", text, flags=re.MULTILINE)
    lines += parts[0].rstrip().splitlines()
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        body = textwrap.dedent(body).rstrip()
        if title == "Example":
            lines += ["", *body.splitlines()]
            continue
        lines += ["", f"**{title}**", ""]
        entries = re.split(r"\n(?!\s|$)", body) if title not in ("Returns", "Yields") else [body]
        for entry in entries:
            entry = " ".join(entry.split())
            lines.append("- " + re.sub(r"^(\*{0,2}[\w.]+): ", r"`\1`: ", entry))
    return lines


def main() -> None:
    """Writes both pages."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    (DOCS / "flags.md").write_text(flags_page())
    (DOCS / "api.md").write_text(api_page())


if __name__ == "__main__":
    main()
