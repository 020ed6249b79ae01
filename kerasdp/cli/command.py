"""Implements the command `kerasdp`: runs, lists and copies recipes, and shows the devices of this machine."""

import ast
import difflib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import kerasdp
from kerasdp.config import BACKENDS, versions
from kerasdp.errors import RunError, UserError, say_flags, say_how_it_ends
from kerasdp.processes.devices import is_installed
from kerasdp.reporting.report import drop_stdout

# A recipe called bisect.py would hide the standard module bisect from other recipes.
_ALSO = {"bisect": "bisection"}
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# The folders of files to run or copy, and their titles.
FOLDERS = {
    "recipes": "Recipes: kerasdp NAME runs them",
    "flags": "Named runs: kerasdp train --flagfile=NAME",
    "cluster": "Templates for SLURM, Kubernetes, torchrun, mpirun and Ray",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command `kerasdp`.

    Args:
        arguments: arguments after `kerasdp` on the command line. None: the arguments of this program.

    Raises:
        SystemExit: if the command fails. The exit code is 2 after a user error, 130 after Ctrl-C, and 1 after any other
            error.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    say_flags()
    try:
        _run(words)
    except (RunError, KeyboardInterrupt) as error:
        sys.exit(say_how_it_ends(error))
    except BrokenPipeError:  # `kerasdp list | head`: nobody reads on
        drop_stdout()


def _run(words: list[str]) -> None:
    name, *rest = words or ["list"]
    recipes = {path.stem: path for path in files("recipes") if path.suffix == ".py"}
    if name in ("list", "help", "--help", "-h") or (name == "copy" and "--help" in rest):
        print(help_text())
    elif name in ("--version", "version"):
        print(f"kerasdp {kerasdp.__version__}")
    elif name == "copy":
        if len(rest) not in (1, 2) or rest[0].startswith("-") or rest[-1].startswith("-"):
            raise UserError(f"expected kerasdp copy NAME [FOLDER]. Received: {' '.join(rest)!r}")
        for path in copy(*rest):
            print(f"copied to {path}")
    elif name == "env":
        _env()
    elif recipe := recipes.get(_ALSO.get(name, name)):
        _run_recipe(recipe, rest)
    else:
        near = difflib.get_close_matches(name, ["list", "copy", "env", *recipes, *_ALSO], n=1)
        instead = f"did you mean kerasdp {near[0]}?" if near else "kerasdp list shows all sub-commands"
        raise UserError(f"there is no sub-command {name!r}; {instead}")


def help_text() -> str:
    """Returns the usage, and one line for each file that can be run or copied."""
    lines = ["usage: kerasdp RECIPE [--flag=value ...]      kerasdp RECIPE --help"]
    lines += ["       kerasdp copy NAME [FOLDER]"]
    lines += ["       kerasdp env      versions, and the devices of each backend, or why it sees none"]
    for folder, title in FOLDERS.items():
        rows = [(name_of(path), summary_of(path)) for path in files(folder)]
        width = max(len(name) for name, _ in rows)
        lines += ["", title, *(f"  {name.ljust(width)}  {summary}" for name, summary in rows)]
    return "\n".join(lines)


def files(folder: str) -> list[pathlib.Path]:
    """Returns the paths of the files in a folder such as `recipes` or `recipes/template`, sorted by name.

    The folder is in the installed package, or in the checkout that contains the package.
    """
    root = _PACKAGE / "kit" if (_PACKAGE / "kit").is_dir() else _PACKAGE.parent
    return [path for path in sorted((root / folder).glob("*")) if path.is_file()]


def name_of(path: pathlib.Path) -> str:
    """Returns the name of a file on the command line, such as `train` or `smoke.flags`."""
    return path.stem if path.suffix == ".py" else path.name


def summary_of(path: pathlib.Path) -> str:
    """Returns the first line of a file's docstring or comments, or the title of a notebook."""
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    if path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    return next((line.lstrip("# ") for line in text.splitlines() if re.match("#[^!]", line)), "")


def _run_recipe(recipe: pathlib.Path, given: list[str]) -> NoReturn:
    """Replaces this program by a recipe, in the same process. So the recipe receives signals and sets the exit code."""
    named = {
        f"--flagfile={name}": f"--flagfile={path}"
        for path in files("flags")
        for name in (path.stem, path.name, f"flags/{path.name}")
        if not os.path.exists(name)  # else it is the user's
    }
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(recipe), *(named.get(flag, flag) for flag in given)])


def copy(name: str, folder: str = ".") -> list[pathlib.Path]:
    """Copies a file and the recipes that it imports, or a whole folder.

    If recipes are copied to a new folder, the folder also gets a `pyproject.toml` and a test that trains two steps.

    Args:
        name: name of a file, with or without its folder and ending, or name of a folder.
        folder: target folder. It is created if it does not exist.

    Returns:
        The paths of the copies.

    Raises:
        UserError: if there is no file or folder of this name, or a target already exists.
    """
    place = pathlib.Path(folder)
    if os.path.lexists(place) and not place.is_dir():
        raise UserError(f"expected a folder to copy into. Received: {folder!r}, which is not a folder")
    sources = dict.fromkeys(path for one in _find(name) for path in _with_imports(one))
    if not place.exists() and {path.suffix for path in sources} == {".py"}:
        sources |= dict.fromkeys(files("recipes/template"))
    targets = {path: place / path.name for path in sources}
    in_the_way = [str(target) for target in targets.values() if os.path.lexists(target)]
    if in_the_way:
        raise UserError(f"these files exist already: {', '.join(in_the_way)}; copy into another folder, or remove them")
    place.mkdir(parents=True, exist_ok=True)
    for source, target in targets.items():
        shutil.copy(source, target)
    return list(targets.values())


def _find(name: str) -> list[pathlib.Path]:
    if name.rstrip("/") in FOLDERS:
        return files(name.rstrip("/"))
    for folder in FOLDERS:
        for path in files(folder):
            if name.removeprefix(f"{folder}/") in (path.name, path.stem):
                return [path]
    raise UserError(f"expected a name that `kerasdp list` shows: a recipe, flagfile or template. Received: {name!r}")


def _with_imports(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the path of a file and of all recipes that it imports, directly or indirectly."""
    names = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE) if path.suffix == ".py" else []
    beside = [path.parent / f"{name}.py" for name in names if name != path.stem]
    return [path, *(other for one in beside if one.exists() for other in _with_imports(one))]


# A process for each framework: in one, all of them would take memory of each GPU.
_DEVICES = """
from kerasdp.backends.{name}.devices import make_devices
from kerasdp.config import Config
from kerasdp.errors import end_in_a_line
end_in_a_line()
print(make_devices(Config(backend="{name}")))
"""


def _env() -> None:
    """Prints the versions of packages, and the devices of each backend or the reason why a backend has no devices."""
    print(f"kerasdp in {os.path.dirname(kerasdp.__file__)}, {sys.executable} on {platform.platform()}")
    print(", ".join(f"{package} {version}" for package, version in versions().items()))
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    is_wrong = False
    for name in BACKENDS:
        if not is_installed(name):
            print(f"{name}: not installed (pip install 'kerasdp[{name}]')")
            continue
        program = [sys.executable, "-c", _DEVICES.format(name=name)]
        done = subprocess.run(program, capture_output=True, text=True, env=env, check=False)
        is_wrong = is_wrong or done.returncode != 0
        said = (done.stderr if done.returncode else done.stdout).strip()
        print(f"{name}: {said.splitlines()[-1] if said else 'its process has ended without a message'}")
    if is_wrong:
        sys.exit(1)
