"""Checks what a checkpoint holds beside its arrays: the file may come from anybody."""

import math
from collections.abc import Callable
from typing import Any

from kerasdp.errors import CheckpointError

_MOST = 2**53  # beyond it a float, as ranks exchange them, is no longer exact


def check_fields(path: str, state: Any) -> dict[str, Any]:
    """Returns the state of a checkpoint, of which each known field that is there is of its kind.

    Raises:
        CheckpointError: if one is not, or there is no `step`.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is corrupt: expected an object as its state. Received: {_shown(state)}")
    require(path, state, "step")
    for name, (expected, is_right) in _FIELDS.items():
        if name in state and not is_right(state[name]):
            raise CheckpointError(f"{path} is corrupt: expected {expected} as {name}. Received: {_shown(state[name])}")
    return state


def require(path: str, state: dict[str, Any], *names: str) -> None:
    """Raises `CheckpointError` if one of these fields is missing."""
    for name in names:
        if name not in state:
            raise CheckpointError(f"{path} is corrupt: there is no {name} in it")


def _shown(value: Any) -> str:
    # Of a list as long as the file, or as deep, only its kind is shown.
    return ascii(value)[:80] if isinstance(value, (str, float, bool, type(None))) else f"{type(value).__name__}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 0 < value < math.inf


def _all(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns whether a value is a list of what is right."""
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _is_value(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, list) and all(map(_is_value, value)))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_logs(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_value, value.values()))


def _is_row(value: Any) -> bool:
    """Returns whether a value is a row of history.csv, which curves can be drawn from."""
    drawn = ("loss", "val_loss", "accuracy", "val_accuracy")
    return (
        _is_logs(value)
        and _is_count(value.get("epoch"))
        and all(_is_number(value[name]) for name in drawn if name in value)
    )


def _has(value: Any, fields: dict[str, Callable[[Any], bool]]) -> bool:
    return isinstance(value, dict) and all(name in value and right(value[name]) for name, right in fields.items())


def _is_recorder(value: Any) -> bool:
    numbers = _all(_is_number)
    fields = {"last_logs": _is_logs, "history": _all(_is_row), "epoch_seconds": numbers, "epoch_rates": numbers}
    return _has(value, {**fields, "images": _is_count, "seconds": _is_number})


def _is_best(value: Any) -> bool:
    return value is None or _has(value, {"name": lambda name: isinstance(name, str), "score": _is_number})


def _is_writer(value: Any) -> bool:
    """Returns whether a value says which run wrote the checkpoint."""
    shares = value.get("device_shares") if isinstance(value, dict) else None
    backend = {"backend": lambda name: isinstance(name, str), "devices": _is_count}
    return _has(value, backend) and (shares is None or _all(_is_positive)(shares))


def _is_config(value: Any) -> bool:
    texts: dict[str, Any] = {"model": str, "dataset": str, "data_dir": (str, type(None))}
    return isinstance(value, dict) and all(name in value and isinstance(value[name], texts[name]) for name in texts)


def _is_place(value: Any) -> bool:
    """Returns whether a value is the place in the data of a reader, as the state of an iterator."""
    if not isinstance(value, dict):
        return value is None
    return value.get("state") is None or _has(value, {"pass": _is_count, "rows": _is_count})


def _is_callbacks(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(attributes, dict) for attributes in value.values())


_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "step": ("a whole number from 0 on", _is_count),
    "epoch": ("a whole number from 0 on", _is_count),
    "batch": ("a whole number from 0 on", _is_count),
    "stopped": ("true or false", lambda value: isinstance(value, bool)),
    "best": ("name and score, or null,", _is_best),
    "data": ("the place in the data", _is_place),
    "identity": ("an object", _is_object),
    "recorder": ("losses and times", _is_recorder),
    "callbacks": ("an object of objects", _is_callbacks),
    "saved_by": ("backend, devices and their shares", _is_writer),
    "config": ("model, dataset and data_dir", _is_config),
    "architecture": ("an object, or null,", lambda value: value is None or isinstance(value, dict)),
    "versions": ("an object", _is_object),
}
