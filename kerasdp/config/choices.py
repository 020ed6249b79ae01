"""Defines options of a run. Checks, flags, help texts and documentation are generated from one definition per option.

The values of some options are names with arguments, as on a command line: `sgd(momentum=0.9)`, `file.py:function`.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from kerasdp.errors import FIELDS_OF_FLAGS, UserError

T = TypeVar("T")


class Range(NamedTuple):
    """The valid values of an option.

    Args:
        expected: description of the valid values, for error messages.
        holds: function that returns whether a value is valid. The value has the option's type and is not None.
    """

    expected: str
    holds: Callable[[Any], bool] = lambda value: True


def one_of(*values: Any) -> Range:
    """Returns a range that consists of the given values."""
    return Range(f"one of {', '.join(str(value) for value in values)}", values.__contains__)


def is_count(text: str) -> bool:
    """Returns whether a text is a whole number of at least 1."""
    return text.isdecimal() and int(text) >= 1


COUNT = Range("a whole number of at least 1", lambda number: number >= 1)
FROM_0 = Range("a whole number of at least 0", lambda number: number >= 0)
POSITIVE = Range("a number above 0", lambda number: math.isfinite(number) and number > 0)
SWITCH = Range("True or False")
FOLDER = Range("a folder")
# `parse` checks the form of a name.
NAME = Range("a name, or a name with arguments such as sgd(momentum=0.9)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The definition of an option.

    Args:
        group: title of the group in which `--help` lists the flag.
        allowed: valid values.
        help: meaning, with its unit. It refers to other options by their flags.
        unset: what the run does if the value is None.
        of_host: whether the hosts of a run may have different values.
        name: name of the field.
        kinds: types of the value.
        default: default value.
    """

    group: str
    allowed: Range
    help: str
    unset: str
    of_host: bool = False
    name: str = ""
    kinds: tuple[type, ...] = ()
    default: Any = None

    @property
    def flag(self) -> str:
        """Returns the name of the flag on the command line."""
        return next((flag for flag, field in FIELDS_OF_FLAGS.items() if field == self.name), self.name)

    @property
    def default_text(self) -> str:
        """Returns the default as text; empty for switches, whose default is off, and if there is no default."""
        if self.default is None:
            return self.unset
        return "" if self.default is False else str(self.default)


def choice(default: T, group: str, allowed: Range, help: str, unset: str = "", **others: Any) -> T:
    """Makes a dataclass field that is an option. The arguments are those that `Choice` documents."""
    known = Choice(group=group, allowed=allowed, help=help, unset=unset, **others)
    return dataclasses.field(default=default, metadata={"choice": known})


@functools.cache
def choices_of(record: type) -> dict[str, Choice]:
    """Returns the options that are fields of a dataclass, by name."""
    found = {}
    for field in dataclasses.fields(record):
        kinds = typing.get_args(field.type) or (field.type,)
        known = dataclasses.replace(field.metadata["choice"], name=field.name, kinds=kinds, default=field.default)
        found[field.name] = known
    return found


def check_choices(record: Any) -> None:
    """Checks the options of a dataclass, and converts paths and NumPy scalars to types that JSON can hold.

    Raises:
        UserError: if a value has the wrong type or is out of range.
    """
    for name, known in choices_of(record.__class__).items():
        value = getattr(record, name)
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif isinstance(value, numbers.Real) and hasattr(value, "item"):
            value = value.item()
        object.__setattr__(record, name, value)
        kinds = (*known.kinds, int) if float in known.kinds else known.kinds
        is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not is_right or not (value is None or known.allowed.holds(value)):
            received = " ".join(repr(value).split())  # an array has several lines
            raise UserError(f"--{known.flag}: expected {known.allowed.expected}. Received: {received:.200}")


def documented(record: type[T]) -> type[T]:
    """Adds the help texts of a dataclass's options to its docstring."""
    head, raises, tail = inspect.cleandoc(record.__doc__ or "").partition("\nRaises:")
    lines = []
    for name, known in choices_of(typing.cast(Any, record)).items():
        unset = f" None: {known.unset}." if known.unset else ""
        text = re.sub(r"--([a-z]\w*)", lambda flag: f"`{FIELDS_OF_FLAGS.get(flag[1], flag[1])}`", known.help + unset)
        text = re.sub(r"'(\S*\*[^']*)'", r"``\1``", text)  # else a docstring's * begins what is emphasised
        lines.append(textwrap.fill(f"{name}: {text}", 112, initial_indent="    ", subsequent_indent="        "))
    record.__doc__ = "\n".join([f"{head}\nArgs:", *lines, f"{raises}{tail}"])
    return record


def parse(text: str, flag: str) -> tuple[str, dict[str, Any]]:
    """Splits `name` or `name(key=value, ...)` into the name and its arguments.

    Args:
        text: the text that the user typed. The values are Python literals.
        flag: name of the flag, for the error message.

    Raises:
        UserError: if the text has another form.
    """
    name, bracket, rest = text.strip().partition("(")
    try:
        call: Any = ast.parse(f"f({rest if bracket else ')'}", mode="eval").body
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        is_right = name and isinstance(call.func, ast.Name) and not call.args and None not in arguments
        if is_right and len(arguments) == len(call.keywords):
            return name.strip(), arguments
    except (AttributeError, SyntaxError, ValueError, RecursionError, MemoryError):  # of brackets in brackets
        pass
    raise UserError(
        f"--{flag}: expected a name, or a name with arguments such as sgd(momentum=0.9). Received: {text!r}"
    )


def load_user_function(name: str, flag: str) -> Callable[..., Any]:
    """Imports a user-defined function.

    Args:
        name: `package.module:function` or `path/to/file.py:function`.
        flag: name of the flag, for the error message.

    Raises:
        UserError: if the file, the module or the function does not exist.
    """
    place, _, function = name.rpartition(":")
    sys.path.append(os.getcwd())  # a program's own folder is on the path, but not the folder it is started from
    try:
        if place.endswith(".py"):
            stem = os.path.splitext(os.path.basename(place))[0]
            found: Any = importlib.util.spec_from_file_location(stem, os.path.abspath(place))
            module = importlib.util.module_from_spec(found)
            sys.modules.setdefault(stem, module)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise UserError(f"--{flag}: {name!r} cannot be loaded: {error}") from error
    finally:
        sys.path.pop()
    if not callable(getattr(module, function, None)):
        raise UserError(f"--{flag}: {place} has no function {function!r}")
    return getattr(module, function)
