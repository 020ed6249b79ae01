"""Describes Keras objects by their arguments, in words that two runs of one program share."""

import base64
import json
import marshal
import types
from typing import Any

import keras

# What depends on precision, process and backend.
_SKIPPED = ("name", "dtype", "seed", "module", "registered_name", "build_config", "trainable")


def in_words(thing: Any, without: tuple[str, ...] = ()) -> str:
    """Returns kind and arguments of a Keras object in words; only the kind if it has no config."""
    if isinstance(thing, (dict, list, tuple)):
        return json.dumps(keras.tree.flatten(keras.tree.map_structure(in_words, thing)))
    arguments = {name: value for name, value in arguments_of(thing).items() if name not in without}
    name = thing if isinstance(thing, str) else getattr(thing, "__name__", type(thing).__name__)
    return f"{name} {json.dumps(comparable(arguments), sort_keys=True)}"


def arguments_of(thing: Any) -> dict[str, Any]:
    """Returns the arguments of a Keras object; none if it has no config, as a user-defined layer may."""
    try:
        return getattr(thing, "get_config", dict)()
    except NotImplementedError:  # what Keras raises where a class has none of its own
        return {}


def comparable(value: Any) -> Any:
    """Returns the arguments in a config as JSON can hold them, without what depends on precision, process and backend.

    Args:
        value: a config, or a part of one.
    """
    if isinstance(value, dict):
        if function := _dumped_lambda(value):
            code, *bound = function
            return ["lambda", _code_in_words(code), comparable(bound)]
        return {str(name): comparable(part) for name, part in value.items() if name not in _SKIPPED}
    if isinstance(value, (list, tuple)):
        return [comparable(part) for part in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _dumped_lambda(config: dict[str, Any]) -> tuple[types.CodeType, Any, Any] | None:
    """Returns code, defaults and closure of a `lambda` from what Keras makes of one; None if it is something else."""
    # Keras 3.15: by names in the layer Lambda, one tuple everywhere else, which of an activation is all that there is.
    if config.keys() == {"code", "defaults", "closure"}:
        dumped = config["code"], config["defaults"], config["closure"]
    elif config.keys() == {"value"} and isinstance(config["value"], (list, tuple)) and len(config["value"]) == 3:
        dumped = tuple(config["value"])
    else:
        return None
    try:
        code = marshal.loads(base64.b64decode(dumped[0]))
    except (TypeError, ValueError, EOFError):
        return None
    return (code, *dumped[1:]) if isinstance(code, types.CodeType) else None


def _code_in_words(code: types.CodeType) -> list[Any]:
    """Returns what code computes, without its file and lines."""
    constants = [
        _code_in_words(constant) if isinstance(constant, types.CodeType)
        # A set's order is another in each process.
        else sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
        for constant in code.co_consts
    ]  # fmt: skip
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars, code.co_flags]
