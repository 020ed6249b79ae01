"""Finds what in a function keeps it from being sent to another process, and says so."""

import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any


class MadeBeforeError(Exception):
    """A Keras object whose variables are those of this process."""


def why_unsendable(function: Callable[..., Any], error: Exception, attempt: Callable[[Any], None]) -> str:
    """Returns a line that names the variable which cannot be sent.

    Args:
        function: the one that was to be sent.
        error: what its attempt raised.
        attempt: raises an exception for a value that cannot be sent.
    """
    found = _find(function, attempt, set())
    name = name_of(function)
    if found is None:
        return (
            f"{name} cannot be sent to worker processes ({first_line(error)}): use a function of a module or a script"
        )
    referrer, variable, value, reason = found
    if isinstance(reason, MadeBeforeError):
        return (
            f"{variable}, which {referrer} refers to, was made before kerasdp.launch: make (or load) the model, the "
            f"optimizer and the metrics in the function that launch calls, for the run's devices and seed"
        )
    return (
        f"{variable}, which {referrer} refers to, is a {type(value).__name__} and cannot be sent to worker processes "
        f"({first_line(reason)}): make it in {name}, or let {name} refer to what it is made of (numbers, arrays, paths)"
    )


def name_of(function: Callable[..., Any]) -> str:
    """Returns how people call a function."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return "the lambda" if name == "<lambda>" else name


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text; its class, where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _find(holder: Any, attempt: Callable[[Any], None], seen: set[int]) -> tuple[str, str, Any, Exception] | None:
    """Returns who refers to what cannot be sent, by which name, the value, and the reason."""
    seen.add(id(holder))
    for name, value in _references(holder):
        if id(value) in seen:
            continue
        try:
            attempt(value)
        except Exception as error:
            return _find(value, attempt, seen) or (name_of(holder), name, value, error)
    return None


def _references(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yields the variables that a function, or the methods of a class, refer to, by name."""
    if isinstance(holder, functools.partial):
        yield from (("the function", holder.func), *holder.keywords.items())
        yield from ((f"argument {number}", value) for number, value in enumerate(holder.args))
    elif isinstance(holder, types.MethodType):
        yield from (("self", holder.__self__), (holder.__name__, holder.__func__))
    elif isinstance(holder, type):
        yield from vars(holder).items()
    elif type(holder).__module__ == "__main__" and not hasattr(
        holder, "variables"
    ):  # a user-defined object, not Keras'
        yield from getattr(holder, "__dict__", {}).items()
    elif isinstance(holder, types.FunctionType):
        parameters = inspect.signature(holder, follow_wrapped=False).parameters.values()
        yield from ((one.name, one.default) for one in parameters if one.default is not one.empty)
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing is in it yet
                yield name, cell.cell_contents
        for name in _globals_of(holder.__code__):
            if name in holder.__globals__:
                yield name, holder.__globals__[name]


def _globals_of(code: types.CodeType) -> list[str]:
    """Returns the global names that code, and functions within it, load."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            names += _globals_of(part)
    return names
