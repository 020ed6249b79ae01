"""Reads a recipe's command line, and writes its `--help`."""

import difflib
import os
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from kerasdp.cli.recipes import Own, Recipe
from kerasdp.config import Config
from kerasdp.config.choices import Choice, choices_of
from kerasdp.config.names import meant
from kerasdp.config.request import Request
from kerasdp.errors import FIELDS_OF_FLAGS, UserError

# The choices that are flags of any recipe. The model and the data of a `Request` are flags of a run, too.
CHOICES = [*(choices_of(Config) | choices_of(Own) | choices_of(Request) | choices_of(Config)).values()]
_KINDS: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_boolean, str: flags.DEFINE_string, float: flags.DEFINE_float, int: flags.DEFINE_integer
}  # fmt: skip
PROGRAM = "KERASDP_PROGRAM"  # in the environment: how the user called the recipe, if not by its file


def in_groups(choices: Iterable[Choice]) -> dict[str, list[Choice]]:
    """Returns choices by their groups, in their order."""
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        groups.setdefault(choice.group, []).append(choice)
    return groups


def help_text(program: str, recipe: Recipe) -> str:
    """Returns the text of a recipe's `--help`: its flags in their groups."""
    command = os.environ.get(PROGRAM, f"python {program}")
    lines = [f"usage: {command} [--flagfile=flags/NAME.flags] [--flag=value ...]"]
    for group, choices in in_groups(recipe.choices()).items():
        lines += ["", f"{group}:"]
        for choice in choices:
            names = ", ".join(f"--{flag}" for flag in reversed(choice.flags))
            default = f" Default: {choice.default_text}." if choice.default_text else ""
            text = f"  {names}: {choice.meaning}{default}"
            lines += textwrap.wrap(text, width=100, subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines)


def define() -> flags.FlagValues:
    """Returns all flags, not read yet."""
    values = flags.FlagValues()
    for choice in CHOICES:
        *others, name = choice.flags
        make = next(make for kind, make in _KINDS.items() if kind in choice.kinds)
        make(name, None, "", flag_values=values)
        for other in others:
            flags.DEFINE_alias(other, name, flag_values=values)
    flags.DEFINE_boolean("help", False, "", flag_values=values, short_name="h")
    flags.DEFINE_flag(flags.Flag(flags.ArgumentParser(), flags.ArgumentSerializer(), "flagfile", "", ""), values)
    return values


def read(arguments: list[str], recipe: Recipe) -> dict[str, Any]:
    """Returns what a command line says, by field, and the recipe's own defaults.

    Args:
        arguments: `sys.argv`, the program's name included.
        recipe: which flags there are.

    Raises:
        UserError: if a flag is unknown, or none of the recipe's, or its value cannot be read.
        SystemExit: after `--help`.
    """
    values, taken = define(), recipe.flags()
    _refuse_code_of_runs(arguments[1:], values)
    without = {
        flag: recipe.reason_against(choice.name) for choice in CHOICES for flag in choice.flags if flag not in taken
    }
    try:
        rest = values(arguments, known_only=False)
    except flags.UnrecognizedFlagError as error:
        raise UserError(_unknown(error.flagname, without, values)) from error
    except flags.Error as error:
        raise UserError(f"{' '.join(str(error).split())}; --help lists all flags") from error
    if values["help"].value:
        print(help_text(arguments[0], recipe))
        raise SystemExit(0)
    if len(rest) > 1:
        raise UserError(f"expected flags only. Received: {' '.join(rest[1:])!r}; --help lists all flags")
    for name, instead in without.items():
        if values[name].present:
            raise UserError(f"--{name} has no effect here: {instead}")
    given = {FIELDS_OF_FLAGS.get(name, name): values[name].value for name in taken if values[name].present}
    return recipe.defaults | given


def _refuse_code_of_runs(arguments: list[str], values: flags.FlagValues) -> None:
    """Raises `UserError` for a flagfile in a run's folder that names code: whoever left the run chose it."""
    for number, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.lstrip("-") != "flagfile":
            continue
        path = os.path.expanduser((value or "".join(arguments[number + 1 : number + 2])).strip())  # as absl reads it
        if not os.path.exists(os.path.join(os.path.dirname(path), "config.json")):
            continue
        try:
            found = values.read_flags_from_files([f"--flagfile={path}"])
        except (flags.Error, OSError, ValueError) as error:
            raise UserError(f"--flagfile: cannot read {path!r} ({' '.join(str(error).split())})") from error
        for flag, following in zip(found, [*found[1:], ""]):  # --name=value, or one after the other
            name, _, value = flag.partition("=")
            names_code = name.lstrip("-") in ("model", "dataset", "sweep") and ":" in (value or following)
            if names_code or name.lstrip("-") == "trust_checkpoint":
                raise UserError(
                    f"--flagfile: {path} is in the folder of a run, and names code: {ascii(flag)[1:-1]:.200}; copy the "
                    "file to another folder once you have read it, or write the flag yourself"
                )


def _unknown(name: str, without: dict[str, str], known: Iterable[str]) -> str:
    """Returns what to say of a flag that there is not."""
    field = meant(name)
    near = [choices_of(Config)[field].flags[-1]] if field else difflib.get_close_matches(name, list(known), n=1)
    instead = f"; did you mean --{near[0]}?" if near and near[0] not in without else "."
    if near and near[0] in without:
        instead = f", and --{near[0]} has no effect here: {without[near[0]]};"
    return f"there is no flag --{name}{instead} --help lists all flags"
