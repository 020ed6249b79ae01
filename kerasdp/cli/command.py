"""The command `kerasdp`: runs the recipes, lists and copies them, flagfiles and templates; looks at this machine."""

import ast
import difflib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import kerasdp
from kerasdp.cli.main import PROGRAM, ending_with_a_line
from kerasdp.config import BACKENDS
from kerasdp.errors import UserError
from kerasdp.processes.devices import is_installed
from kerasdp.reporting.report import drop_stdout

# A recipe bisect.py would hide Python's own module from the others.
_ALSO = {"bisect": "bisection"}
_OF_COPY = "NAME [DESTINATION] [--force]"
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# The folders of what people run and copy: what each holds, and the endings of its files.
FOLDERS = {
    "recipes": ("Recipes: kerasdp NAME runs them", (".py", ".ipynb")),
    "flags": ("Named runs: kerasdp train --flagfile=NAME", (".flags",)),
    "cluster": ("Templates for SLURM, Kubernetes, torchrun, mpirun and Ray", (".sbatch", ".yaml", ".sh")),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command, and ends the program.

    Args:
        arguments: what follows `kerasdp` on the command line. None: those of this program.

    Raises:
        SystemExit: where the exit code is not 0: 2 for a user's mistake, 1 for what has failed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with ending_with_a_line():
            _run(words)
    except BrokenPipeError:  # `kerasdp list | head`: nobody reads on
        drop_stdout()


def _run(words: list[str]) -> None:
    name, *rest = words or ["list"]
    recipes = {path.stem: path for path in files("recipes") if path.suffix == ".py"}
    if name in ("list", "help", "--help", "-h") or (name in ("copy", "env") and {"--help", "-h"} & set(rest)):
        print(help_text())
    elif name in ("--version", "version"):
        print(f"kerasdp {kerasdp.__version__}")
    elif name == "copy":
        _copy(rest)
    elif name == "env":
        _env()
    elif recipe := recipes.get(_ALSO.get(name, name).replace("-", "_")):
        _run_recipe(recipe, rest)
    else:
        near = difflib.get_close_matches(name, ["list", "copy", "env", *recipes, *_ALSO], n=1)
        instead = f"did you mean kerasdp {near[0]}?" if near else "kerasdp list shows all"
        raise UserError(f"there is no sub-command {name!r}; {instead}")


def help_text() -> str:
    """Returns the usage, and what can be run and copied, a line each."""
    lines = ["usage: kerasdp RECIPE [--flag=value ...]      kerasdp RECIPE --help"]
    lines += [f"       kerasdp copy {_OF_COPY}"]
    lines += ["       kerasdp env      versions, backends, devices, and GPUs that a backend does not see"]
    for folder, (title, _) in FOLDERS.items():
        rows = [(name_of(path), summary_of(path)) for path in files(folder)]
        width = max(len(name) for name, _ in rows)
        lines += ["", title, *(f"  {name.ljust(width)}  {summary}" for name, summary in rows)]
    return "\n".join(lines)


def files(folder: str) -> list[pathlib.Path]:
    """Returns the files of one of `FOLDERS`, which are in the installed package, or in the checkout that it is in."""
    root = _PACKAGE / "kit" if (_PACKAGE / "kit").is_dir() else _PACKAGE.parent
    return [path for path in sorted((root / folder).glob("*")) if path.suffix in FOLDERS[folder][1]]


def name_of(path: pathlib.Path) -> str:
    """Returns what the command calls a file: `train`, `smoke.flags`."""
    return path.stem if path.suffix == ".py" else path.name


def summary_of(path: pathlib.Path) -> str:
    """Returns the first line of a file: of its docstring, of its comments, or the title of a notebook."""
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    if path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    return next((line.lstrip("# ") for line in text.splitlines() if re.match("#[^!]", line)), "")


def _run_recipe(recipe: pathlib.Path, given: list[str]) -> NoReturn:
    """Becomes the program of a recipe, which gets signals and gives its exit code by itself."""
    flags = []
    for flag in given:
        name, _, value = flag.partition("=")
        if name.lstrip("-") == "flagfile" and value and not os.path.exists(value):  # one of the kit's, by its name
            path = next((path for path in files("flags") if value in (path.name, path.stem, f"flags/{path.name}")), "")
            flag = f"{name}={path or value}"
        flags.append(flag)
    os.environ[PROGRAM] = f"kerasdp {recipe.stem}"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(recipe), *flags])


def _copy(words: list[str]) -> None:
    names = [word for word in words if word != "--force"]
    if len(names) not in (1, 2) or any(name.startswith("-") for name in names):
        raise UserError(
            f"expected kerasdp copy {_OF_COPY}. Received: {' '.join(words)!r}; kerasdp list shows the names"
        )
    for path in copy(names[0], *names[1:] or ["."], force="--force" in words):
        print(f"copied to {path}")


def copy(name: str, destination: str, *, force: bool) -> list[pathlib.Path]:
    """Copies a file, with the recipes that it imports, or a whole folder.

    Args:
        name: of a file, with or without its folder and ending, or of a folder.
        destination: a folder, which is made if need be, or, of one item, a file with the same ending.
        force: overwrite what is there; of a link the link, not what it leads to.

    Returns:
        The files that were written.

    Raises:
        UserError: if there is no such item, or a file is in the way.
    """
    found, place = _find(name), pathlib.Path(destination)
    is_of_kind = len(found) == 1 and place.suffix == found[0].suffix
    if os.path.lexists(place) and not place.exists():
        raise UserError(f"expected a folder or a file to copy to. Received: {destination!r}, a link to nothing")
    if place.is_file() and not is_of_kind:
        raise UserError(f"expected a folder to copy into. Received: {destination!r}, which is a file")
    sources = dict.fromkeys(path for one in found for path in _with_imports(one))
    targets = {path: place / path.name for path in sources}
    if is_of_kind and not place.is_dir():
        targets = {path: place.parent / path.name for path in sources} | {found[0]: place}
    in_the_way = [str(target) for target in targets.values() if os.path.lexists(target)]
    if in_the_way and not force:
        raise UserError(f"there is already {', '.join(in_the_way)}: copy to another place, or overwrite with --force")
    for source, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink():  # not what it leads to
            target.unlink()
        shutil.copy(source, target)
    return list(targets.values())


def _find(name: str) -> list[pathlib.Path]:
    if name.rstrip("/") in FOLDERS:
        return files(name.rstrip("/"))
    for folder in FOLDERS:
        for path in files(folder):
            if name.removeprefix(f"{folder}/") in (path.name, path.stem):
                return [path]
    raise UserError(f"expected the name of a recipe, a flagfile, or what else `kerasdp list` shows. Received: {name!r}")


def _with_imports(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the path of a file, and those of the recipes that it imports, or that these import."""
    names = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE) if path.suffix == ".py" else []
    beside = [path.parent / f"{name}.py" for name in names if name != path.stem]
    return [path, *(other for one in beside if one.exists() for other in _with_imports(one))]


def _env() -> None:
    """Shows versions, backends and devices, and GPUs that a backend does not see, with the command that mends it."""
    print(f"kerasdp {kerasdp.__version__} in {os.path.dirname(kerasdp.__file__)}")
    print(f"Python {platform.python_version()} ({sys.executable}) on {platform.platform()}")
    print(f"keras {importlib.metadata.version('keras')}, numpy {importlib.metadata.version('numpy')}")
    problems = []
    for name in BACKENDS:
        if not is_installed(name):
            print(f"{name}: not installed (pip install 'kerasdp[{name}]')")
            continue
        found = _backend_facts(name)
        if "error" in found:
            problems.append(f"{name} cannot be imported ({found['error']}): pip install --force-reinstall {name}")
            continue
        devices, unseen = found.pop("devices"), found.pop("unseen", "")
        print(f"{name} {found.pop('version')}: {', '.join(devices) or 'no GPU or TPU; virtual CPU devices'}")
        print("".join(f"    {what} {value}\n" for what, value in found.items() if value), end="")
        if unseen and not devices:
            problems.append(unseen)
    print("\n".join(f"wrong: {problem}" for problem in problems) or "nothing is wrong")
    if problems:
        sys.exit(1)


_SECONDS_FOR_A_BACKEND = 120


def _backend_facts(name: str) -> dict[str, Any]:
    """Asks a framework, in a process of its own, which devices it sees: all of them would take memory of each GPU."""
    program = (
        f"import json, kerasdp.backends.{name}.devices as own; from kerasdp.processes.hardware import why_unseen; "
        f"print('FOUND', json.dumps(own.describe() | {{'unseen': why_unseen({name!r})}}))"
    )
    words, limit = [sys.executable, "-c", program], _SECONDS_FOR_A_BACKEND
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit, env=env, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"it has not answered within {limit} s"}
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
            return found
    return {"error": (done.stderr.strip().splitlines() or ["it has ended"])[-1]}
