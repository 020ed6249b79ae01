"""Parses names with arguments, as they are typed on a command line: `sgd(momentum=0.9)`, `file.py:function`."""

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from kerasdp.errors import UserError


def parse(text: str, flag: str) -> tuple[str, dict[str, Any]]:
    """Splits `name` or `name(key=value, ...)` into the name and its arguments.

    Args:
        text: what the user typed; values are Python literals.
        flag: the flag's name, for the error message.

    Raises:
        UserError: if the text is of neither form.
    """
    wrong = UserError(
        f"--{flag}: expected a name, or a name with arguments such as sgd(momentum=0.9). Received: {text!r}"
    )
    name, bracket, rest = text.strip().partition("(")
    if not name.strip():
        raise wrong
    if not bracket:
        return name.strip(), {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise wrong
        if any(word.arg is None for word in call.keywords):  # **{...}
            raise wrong
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of brackets in brackets
        raise wrong from error
    if len(arguments) < len(call.keywords):
        raise UserError(f"--{flag}: expected each argument once. Received: {text!r}")
    return name.strip(), arguments


def is_user_function(name: str) -> bool:
    """Returns whether `name` is a user-defined function (`package.module:function`, `path/file.py:function`)."""
    return ":" in name


def load_user_function(name: str, flag: str) -> Callable[..., Any]:
    """Imports a user-defined function.

    Args:
        name: `package.module:function` or `path/to/file.py:function`.
        flag: the flag's name, for the error message.

    Raises:
        UserError: if there is no such file, module or function.
    """
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        if not os.path.isfile(place):
            raise UserError(f"--{flag}: there is no file {place!r}. Received: {name!r}")
        stem = os.path.splitext(os.path.basename(place))[0]
        module_spec: Any = importlib.util.spec_from_file_location(stem, os.path.abspath(place))
        module = importlib.util.module_from_spec(module_spec)
        sys.modules.setdefault(stem, module)
        module_spec.loader.exec_module(module)
    else:
        # A program's own folder is on the path, but not the folder it is started from.
        sys.path.append(os.getcwd())
        try:
            if importlib.util.find_spec(place) is None:
                raise ModuleNotFoundError(place)
        except (ModuleNotFoundError, ValueError) as error:
            raise UserError(f"--{flag}: there is no module {place!r}. Received: {name!r}") from error
        else:
            module = importlib.import_module(place)
        finally:
            sys.path.pop()
    found = getattr(module, function, None)
    if not callable(found):
        have = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise UserError(f"--{flag}: {place} has no function {function!r}; it has: {have or 'none'}")
    return found
