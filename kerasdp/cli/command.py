"""The command `kerasdp`: runs the recipes, lists and copies them, looks at this machine."""

import argparse
import difflib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import kerasdp
from kerasdp.cli import kit
from kerasdp.cli.flags import PROGRAM
from kerasdp.cli.main import ending_with_a_line
from kerasdp.config.validation import BACKENDS, version_of
from kerasdp.errors import UserError
from kerasdp.reporting.report import drop_stdout
from kerasdp.runtime.devices import is_installed

# A recipe bisect.py would hide Python's own module from the others.
_ALSO = {"bisect": "bisection"}


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; {self.prog} --help tells more")


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
            code = _run(words)
    except BrokenPipeError:  # `kerasdp list | head`: nobody reads on
        drop_stdout()
        code = 0
    if code:
        sys.exit(code)


def _run(words: list[str]) -> int:
    name, *rest = words or ["--help"]
    if name in ("--help", "-h", "help"):
        print(help_text())
        return 0
    if name in ("--version", "version"):
        print(f"kerasdp {kerasdp.__version__}")
        return 0
    recipe = kit.recipes().get(_ALSO.get(name, name).replace("-", "_"))
    if recipe is not None:
        return _run_recipe(recipe, rest)
    if name in _COMMANDS:
        return _COMMANDS[name](rest)
    names = [*_COMMANDS, *kit.recipes(), *_ALSO]
    near = difflib.get_close_matches(name, names, n=1)
    instead = f"did you mean kerasdp {near[0]}?" if near else "kerasdp --help lists all"
    raise UserError(f"there is no sub-command {name!r}; {instead}")


def help_text() -> str:
    """Returns the text of `kerasdp --help`: all sub-commands, a line each."""
    recipes = [(item.name, item.summary) for item in kit.recipes().values()]
    own = [(name, str(function.__doc__).partition("\n")[0]) for name, function in _COMMANDS.items()]
    width = max(len(name) for name, _ in recipes + own)
    lines = ["usage: kerasdp COMMAND [--flag=value ...]      kerasdp COMMAND --help", ""]
    for title, rows in (("Recipes:", recipes), ("Beside them:", own)):
        lines += [title, *(f"  {name.ljust(width)}  {summary}" for name, summary in rows), ""]
    return "\n".join(lines).rstrip()


def _run_recipe(recipe: kit.Item, flags: list[str]) -> NoReturn:
    """Becomes the program of a recipe, which gets signals and gives its exit code by itself."""
    flags = [_with_path(flag) for flag in flags]
    os.environ[PROGRAM] = f"kerasdp {recipe.name}"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(recipe.path), *flags])


def _with_path(flag: str) -> str:
    """Returns `--flagfile=smoke` with the path of that flagfile, unless there is such a file here."""
    name, _, value = flag.partition("=")
    if name.lstrip("-") != "flagfile" or not value or os.path.exists(value):
        return flag
    for item in kit.items("flags"):
        if value in (item.name, item.path.stem, f"flags/{item.name}"):
            return f"{name}={item.path}"
    return flag


def _list(words: list[str]) -> int:
    """Lists recipes, flagfiles and templates."""
    parser = _Parser(prog="kerasdp list", description=_list.__doc__, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", choices=list(kit.FOLDERS), help="of these alone")
    chosen = parser.parse_args(words).folder
    for folder, (title, _) in kit.FOLDERS.items():
        if chosen in (None, folder):
            found = kit.items(folder)
            width = max(len(item.name) for item in found)
            print(f"{title}\n" + "\n".join(f"  {item.name.ljust(width)}  {item.summary}" for item in found) + "\n")
    return 0


def _copy(words: list[str]) -> int:
    """Copies a recipe, a flagfile or a template, to change it."""
    parser = _Parser(prog="kerasdp copy", description=_copy.__doc__, allow_abbrev=False)
    parser.add_argument("name", help="as kerasdp list shows it, or a whole folder: recipes, flags, cluster")
    parser.add_argument("destination", nargs="?", default=".", help="folder or file; default: this folder")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    asked = parser.parse_args(words)
    written = kit.copy(asked.name, asked.destination, force=asked.force)
    for path in written:
        print(f"copied to {path}")
    if written[0].suffix == ".py":
        takes_flags = any(word in written[0].read_text() for word in ("kerasdp.main(", "argparse", "protocol"))
        print(f"next: python {written[0]}{' --help' * takes_flags}")
    return 0


def _env(words: list[str]) -> int:
    """Shows versions, backends and devices, and GPUs that a backend does not see, with the command that mends it."""
    _Parser(prog="kerasdp env", description=_env.__doc__, allow_abbrev=False).parse_args(words)
    print(f"kerasdp {kerasdp.__version__} in {os.path.dirname(kerasdp.__file__)}")
    print(f"Python {platform.python_version()} ({sys.executable}) on {platform.platform()}")
    print(f"keras {version_of('keras')}, numpy {version_of('numpy')}")
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
    return 1 if problems else 0


_COMMANDS: dict[str, Callable[[list[str]], Any]] = {"list": _list, "copy": _copy, "env": _env}
_SECONDS_FOR_A_BACKEND = 120


def _backend_facts(name: str) -> dict[str, Any]:
    """Asks a framework, in a process of its own, which devices it sees: all of them would take memory of each GPU."""
    program = (
        f"import json, kerasdp.backends.{name}.devices as own; from kerasdp.runtime.hardware import why_unseen; "
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
