"""The command `kerasdp`: runs the recipes, lists and copies them, looks at runs and at this machine."""

import argparse
import difflib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from packaging.requirements import Requirement

import kerasdp
from kerasdp.cli import kit
from kerasdp.cli.flags import PROGRAM, recipe_in
from kerasdp.cli.main import ending_with_a_line
from kerasdp.config.choices import Choice
from kerasdp.config.validation import BACKENDS, version_of
from kerasdp.errors import UserError
from kerasdp.reporting import comparison
from kerasdp.reporting.report import drop_stdout
from kerasdp.runtime import hardware
from kerasdp.runtime.devices import choose_backend, is_installed

# A recipe bisect.py would hide Python's own module from the others.
_ALSO = {"bisect": "bisection"}
_SELF_TEST = ["--device_counts=1,2", "--max_steps=10", "--device=cpu"]


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
    """Lists recipes, flagfiles, benchmark programs and templates."""
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
    """Copies a recipe, a flagfile, a benchmark program or a template, to change it."""
    parser = _Parser(prog="kerasdp copy", description=_copy.__doc__, allow_abbrev=False)
    parser.add_argument("name", help="as kerasdp list shows it, or a whole folder: recipes, flags, benchmarks, cluster")
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
    """Shows versions, backends and devices, and what is wrong here, with the command that mends it."""
    _Parser(prog="kerasdp env", description=_env.__doc__, allow_abbrev=False).parse_args(words)
    lines, problems = _environment_report()
    print("\n".join(lines))
    print("\n".join(f"wrong: {problem}" for problem in problems) or "nothing is wrong")
    return 1 if problems else 0


def _runs(words: list[str]) -> int:
    """Shows the runs of a folder: settings that differ, final metrics, speed; and a picture of their curves."""
    parser = _Parser(prog="kerasdp runs", description=_runs.__doc__, allow_abbrev=False)
    parser.add_argument("folder", nargs="?", default="runs", help="default: runs")
    parser.add_argument("--picture", help="PNG file of the curves; default: runs.png in the folder")
    parser.add_argument("--csv", help="file for the table")
    asked = parser.parse_args(words)
    runs = comparison.read_runs(comparison.find_runs(asked.folder))
    rows = comparison.rows_of(runs)
    print(comparison.table(rows))
    if asked.csv:
        comparison.write_csv(rows, asked.csv)
        print(f"table in {asked.csv}")
    if any(run.history for run in runs):
        picture = asked.picture or str(pathlib.Path(asked.folder) / "runs.png")
        comparison.draw(runs, picture)
        print(f"curves in {picture}")
    return 0


def _test(words: list[str]) -> int:
    """Trains a small model on each backend, on one and two devices of this machine's CPU: do they learn the same?"""
    parser = _Parser(prog="kerasdp test", description=_test.__doc__, allow_abbrev=False)
    parser.add_argument("--backends", help="comma-separated; default: all that are installed")
    parser.add_argument("--workdir", default="runs/self-test", help="folder of the picture; default: runs/self-test")
    asked = parser.parse_args(words)
    problems = _environment_report()[1]
    for problem in problems:
        print(f"wrong: {problem}")
    flags = [*_SELF_TEST, f"--workdir={asked.workdir}"] + ([f"--backends={asked.backends}"] if asked.backends else [])
    code = subprocess.run([sys.executable, str(kit.recipes()["parity"].path), *flags], check=False).returncode
    if code == 0:
        print("passed: all of them learn the same on this machine")
    elif code == 1:
        print("failed: they do not learn the same; what differs stands above", file=sys.stderr)
    return code or (1 if problems else 0)


def _completion(words: list[str]) -> int:
    """Prints what a shell needs to complete this command."""
    parser = _Parser(prog="kerasdp completion", description=_completion.__doc__, allow_abbrev=False)
    parser.add_argument("shell", choices=list(SHELLS))
    print(completion_script(parser.parse_args(words).shell, [*kit.recipes()], [*_COMMANDS]))
    return 0


_COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "list": _list,
    "copy": _copy,
    "env": _env,
    "runs": _runs,
    "test": _test,
    "completion": _completion,
}


_BASH = """\
# Completes the command kerasdp. Put this line into ~/.bashrc:  source <(kerasdp completion bash)
_kerasdp() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" flags=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        --*) COMPREPLY=($(compgen -W "$flags" -- "$word"))
            [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace ;;
        *) COMPREPLY=($(compgen -f -- "${{word#*=}}")) ;;
    esac
}}
complete -F _kerasdp kerasdp"""

_ZSH = """\
# Completes the command kerasdp. Put this line into ~/.zshrc:  source <(kerasdp completion zsh)
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""

SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str, recipes: list[str], others: list[str]) -> str:
    """Returns the script that a shell reads.

    Args:
        shell: one of `SHELLS`.
        recipes: names of the recipes, which have flags.
        others: names of the other sub-commands.
    """
    if shell == "fish":
        return _fish_script(recipes, others)
    cases = [f'        {name}) flags="{_as_typed(name)}" ;;' for name in recipes]
    bash = _BASH.format(commands=" ".join([*recipes, *others]), cases="\n".join(cases))
    return bash if shell == "bash" else _ZSH + bash.partition("\n")[2]


def _fish_script(recipes: list[str], others: list[str]) -> str:
    lines = ["# Completes the command kerasdp. In ~/.config/fish/config.fish:  kerasdp completion fish | source"]
    lines += [f"complete -c kerasdp -n __fish_use_subcommand -f -a {name}" for name in [*recipes, *others]]
    for name in recipes:
        for choice in _choices_of(name):
            takes = "" if bool in choice.kinds else " -r"
            text = choice.help.partition(".")[0].replace("'", "")
            for flag in choice.flags:
                lines.append(
                    f"complete -c kerasdp -n '__fish_seen_subcommand_from {name}' -l {flag}{takes} -d '{text}'"
                )
    return "\n".join(lines)


def _choices_of(name: str) -> list[Choice]:
    """Returns the choices that are flags of a recipe; none of a recipe that reads its command line by itself."""
    found = recipe_in(kit.recipes()[name].path)
    return found.choices() if found else []


def _as_typed(name: str) -> str:
    """Returns the flags of a recipe as the start of what is typed."""
    return " ".join(f"--{flag}{'' if bool in c.kinds else '='}" for c in _choices_of(name) for flag in c.flags)


_SECONDS_FOR_A_BACKEND = 120


def _environment_report() -> tuple[list[str], list[str]]:
    """Returns lines that say what there is, and lines that say what is wrong and what mends it."""
    lines, problems = _machine_lines(), _package_lines()
    installed = [name for name in BACKENDS if is_installed(name)]
    if driver := hardware.nvidia_driver():
        lines.append("NVIDIA GPUs, by their driver: {}, CUDA {}.{}".format(driver.num_gpus or "none", *driver.cuda))
    else:
        lines.append("NVIDIA GPUs: no driver")
    for name in BACKENDS:
        if name not in installed:
            lines.append(f"{name}: not installed (pip install 'kerasdp[{name}]')")
            continue
        found = _backend_facts(name)
        if "error" in found:
            lines.append(f"{name}: cannot be used")
            problems.append(f"{name} cannot be imported ({found['error']}): pip install --force-reinstall {name}")
            continue
        devices, unseen = found.pop("devices"), found.pop("unseen", "")
        lines.append(f"{name} {found.pop('version')}: {', '.join(devices) or 'no GPU or TPU; virtual CPU devices'}")
        lines += [f"    {what} {value}" for what, value in found.items() if value]
        if unseen and not devices:
            problems.append(f"{unseen} (docs/accelerators.md)")
    try:
        lines.append(f"backend of a run without --backend: {choose_backend(None)}")
    except UserError as error:
        problems.append(str(error))
    if clash := hardware.clash_of_cuda_packages():
        problems.append(clash)
    return lines, problems


def _machine_lines() -> list[str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        f"kerasdp {version_of('kerasdp')} in {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}",
        f"Python {platform.python_version()} ({sys.executable}) on {platform.platform()}",
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} CPU cores, "
        f"{memory:.0f} GiB of memory",
        f"keras {version_of('keras') or 'not installed'}, numpy {version_of('numpy') or 'not installed'}",
    ]


def _package_lines() -> list[str]:
    """Returns what is missing or of another version than kerasdp needs; of extras only what is installed."""
    problems = []
    for text in importlib.metadata.requires("kerasdp") or []:
        wanted = Requirement(text)
        extra = next((name for name in BACKENDS if wanted.marker and wanted.marker.evaluate({"extra": name})), None)
        if wanted.marker and extra is None:
            continue
        found = version_of(wanted.name)
        if found is None and extra is None:
            problems.append(f"{wanted.name} is not installed: pip install '{wanted.name}{wanted.specifier}'")
        elif found is not None and not wanted.specifier.contains(found, prereleases=True):
            problems.append(
                f"{wanted.name} {found} is installed, kerasdp needs {wanted.specifier}: "
                f"pip install '{wanted.name}{wanted.specifier}'"
            )
    return problems


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
