"""Defines how an option of a run is described, checked and parsed.

Each option has one definition. Checks, flags, help texts and documentation are generated from this definition. A
value may be a name with arguments, such as `sgd(momentum=0.9)`, or a function, such as `file.py:function`.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
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
        holds: function that takes a value, and returns whether it is valid. The function is called only with values of
            the right type, and never with None.
    """

    expected: str
    holds: Callable[[Any], bool] = lambda value: True


def one_of(*values: Any) -> Range:
    """Returns a `Range` in which only the given values are valid."""
    return Range(f"one of {', '.join(str(value) for value in values)}", values.__contains__)


def is_count(text: str) -> bool:
    """Returns whether a string is a whole number of at least 1."""
    return text.isdecimal() and int(text) >= 1


COUNT = Range("a whole number of at least 1", lambda number: number >= 1)
FROM_0 = Range("a whole number of at least 0", lambda number: number >= 0)
SWITCH = Range("True or False")
FOLDER = Range("a folder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """The definition of an option.

    Args:
        group: title of the group in which `--help` lists the flag.
        allowed: valid values.
        help: help text with the meaning and the unit of the value. It names other options by flag.
        unset: text that says what the run does if the value is None.
        of_host: whether the value may differ between the hosts of a run.
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
        """Returns the default value as text. It is `unset` for the default None, and empty for the default False."""
        if self.default is None:
            return self.unset
        return "" if self.default is False else str(self.default)


def choice(default: T, group: str, allowed: Range, help: str, unset: str = "", **others: Any) -> T:
    """Creates a dataclass field for an option. See `Choice` for the arguments."""
    known = Choice(group=group, allowed=allowed, help=help, unset=unset, **others)
    return dataclasses.field(default=default, metadata={"choice": known})


@functools.cache
def choices_of(record: type) -> dict[str, Choice]:
    """Returns the definitions of the options that are fields of a dataclass, by name of the field."""
    found = {}
    for field in dataclasses.fields(record):
        kinds = typing.get_args(field.type) or (field.type,)
        known = dataclasses.replace(field.metadata["choice"], name=field.name, kinds=kinds, default=field.default)
        found[field.name] = known
    return found


def check_choices(record: Any) -> None:
    """Checks the values of all options of a dataclass instance.

    Paths and NumPy scalars are replaced by strings and Python numbers, which JSON can represent.

    Raises:
        UserError: if a value has the wrong type or is not valid.
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
    """Adds the help texts of all options to the docstring of a dataclass. Returns the dataclass."""
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
        text: value of a flag. The values of the arguments in it are Python literals.
        flag: name of the flag, for the error message.

    Raises:
        UserError: if the text has neither of these forms.
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
    """Imports a user-defined function, and returns it.

    Args:
        name: `package.module:function` or `path/to/file.py:function`.
        flag: name of the flag, for the error message.

    Raises:
        UserError: if the file, the module or the function does not exist, or the file defines a flag again.
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
        raise UserError(f"--{flag}: {name!r} cannot be loaded: {error}; check the path and its imports") from error
    except importlib.import_module("absl.flags").DuplicateFlagError as error:  # imports absl only after an error
        twice = str(error).partition(".")[0]  # The flag 'batch_size' is defined twice
        advice = f"move {function} to a file that defines no flags"
        raise UserError(f"--{flag}: {place} defines a flag of this program ({twice}); {advice}") from error
    finally:
        sys.path.pop()
    if not callable(getattr(module, function, None)):
        raise UserError(f"--{flag}: {place} has no function {function!r}; check the name after the colon")
    return getattr(module, function)
