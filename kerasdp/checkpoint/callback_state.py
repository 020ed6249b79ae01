"""Takes and gives back the state of callbacks: their attributes, in NumPy and JSON.

In JSON, `{"array": key}` stands for an array, `{"weights": [...]}` for arrays like the weights of the model, and
`{"kind": class, "items": [...]}` for what holds others, unless it is a list. A user's dictionary is of the last
form, whatever is in it. Files of before have dictionaries as they are.
"""

import collections
import copy
import json
from typing import Any

import keras
import numpy as np

from kerasdp.checkpoint.names import names_in
from kerasdp.keras_compat.layers import is_of_keras

# Of Keras' `Callback`, or set anew by each `fit`.
_NOT_STATE = ("_model", "params", "validation_data")
_PLAIN = (bool, int, float, str, type(None))
_HOLDING = (list, tuple, dict, set, frozenset, collections.deque)
# What can be made of its items alone. Others (a defaultdict, a deque with its length) take them if they are there.
_MADE_OF_ITEMS = {
    kind.__name__: kind for kind in (list, tuple, dict, set, frozenset, collections.Counter, collections.OrderedDict)
}
# How deep an attribute that cannot be saved is looked at for changes.
_DEPTH = 3


def callback_states(
    callbacks: list[keras.callbacks.Callback],
    begin: list[dict[str, str]],
    arrays: dict[str, np.ndarray],
    model: keras.Model,
) -> dict[str, dict[str, Any]]:
    """Returns the state of each callback: its attributes that changed, if they are numbers, text, arrays, or hold such.

    Args:
        callbacks: of the run.
        begin: of each, what `plain_attributes` gave when the run began.
        arrays: takes the arrays, which the result then names.
        model: of the run. Lists of arrays that are like its weights, as the best ones of `EarlyStopping`, are saved in
            an order that is the same on all backends.
    """
    states = {}
    for key, callback, known in zip(_callback_keys(callbacks), callbacks, begin):
        state = {}
        for name, value in _attributes(callback).items():
            found: dict[str, np.ndarray] = {}
            try:
                encoded = _encode(value, f"callbacks/{key}/{name}", found, model)
            except (TypeError, RecursionError):
                continue
            if found or json.dumps(encoded) != known.get(name):
                state[name] = encoded
                arrays.update(found)
        if state:
            states[key] = state
    return states


def restore_callbacks(
    callbacks: list[keras.callbacks.Callback],
    states: dict[str, dict[str, Any]],
    arrays: dict[str, np.ndarray],
    model: keras.Model,
) -> list[str]:
    """Gives callbacks the state that `callback_states` took; one that is new keeps its own.

    Returns:
        The attributes that keep their own value, since what was saved needs an object that is not there.
    """
    left = []
    for key, callback in zip(_callback_keys(callbacks), callbacks):
        for name, value in states.get(key, {}).items():
            own, shown = vars(callback).get(name), f"{type(callback).__name__}.{ascii(name)[1:-1]:.80}"
            if not _may_be_restored(callback, name, value):
                left.append(shown)
                continue
            # Of what two attributes share, only one may have changed.
            is_shared = sum(other is own for other in vars(callback).values()) > 1
            try:
                setattr(callback, name, _decode(value, arrays, _copied(own) if is_shared else own, model))
            except (LookupError, TypeError, ValueError, RecursionError):  # the file may hold anything
                left.append(shown)
    return left


def _may_be_restored(callback: keras.callbacks.Callback, name: str, value: Any) -> bool:
    """Returns whether a file may say an attribute: data, but no function, and no text of Keras' own callbacks.

    Theirs are places to write to, which only whoever made the callback chooses.
    """
    own = vars(callback).get(name, getattr(type(callback), name, None))
    if name in _NOT_STATE or name.startswith("__") or callable(own) or hasattr(own, "__set__"):  # of a property
        return False
    return not (isinstance(value, str) and is_of_keras(type(callback)))


def plain_attributes(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Returns a callback's attributes that JSON can hold, in JSON."""
    found = {}
    for name, value in _attributes(callback).items():
        try:
            found[name] = json.dumps(_encode(value, "", None))
        except (TypeError, RecursionError):
            continue
    return found


def unsaved_attributes(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Returns a user-defined callback's attributes that cannot be saved, in words that change when one is replaced.

    Also when something in a list or dictionary is; not when an object changes inside.
    """
    if is_of_keras(type(callback)):  # theirs are files and functions, which they make anew
        return {}
    saved = plain_attributes(callback)
    return {name: _described(value) for name, value in _attributes(callback).items() if name not in saved}


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items() if name not in _NOT_STATE}


def _described(value: Any, depth: int = _DEPTH) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth and isinstance(value, _HOLDING):
        parts = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
        return f"{type(value).__name__}({', '.join(_described(part, depth - 1) for part in parts)})"
    return f"{type(value).__name__} at {id(value)}"


def _order_of_names(model: keras.Model) -> list[int]:
    """Returns the places of a model's weights in `model.weights`, by the order of their names."""
    names = names_in(model).variables
    weights = model.weights
    return sorted(range(len(weights)), key=lambda place: names[id(weights[place])])


def _canonical_order(model: keras.Model, value: Any) -> list[int] | None:
    """Returns `_order_of_names` if a value is a list of arrays like the weights of a model; else None."""
    if not (isinstance(value, list) and value and all(isinstance(array, np.ndarray) for array in value)):
        return None
    if [array.shape for array in value] != [tuple(weight.shape) for weight in model.weights]:
        return None
    return _order_of_names(model)


def _callback_keys(callbacks: list[keras.callbacks.Callback]) -> list[str]:
    """Returns a key for each callback, by class and number: the processes of a run may hold different callbacks."""
    names = [type(callback).__name__ for callback in callbacks]
    return [f"{name}/{names[:place].count(name)}" for place, name in enumerate(names)]


def _encode(value: Any, key: str, arrays: dict[str, np.ndarray] | None, model: keras.Model | None = None) -> Any:
    """Returns a value as JSON can hold it, copies of its arrays in `arrays`; `TypeError` if it cannot be saved."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic) and isinstance(value.item(), _PLAIN):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.itemsize <= 8:
        if arrays is not None:
            arrays[key] = value.copy()
        return {"array": key}
    if not isinstance(value, _HOLDING):
        raise TypeError
    kind = type(value).__name__
    if kind not in _MADE_OF_ITEMS and isinstance(value, (tuple, frozenset)):  # which cannot take items later
        raise TypeError
    order = None if model is None else _canonical_order(model, value)
    if order is not None and isinstance(value, list):
        return {"weights": _encode([value[place] for place in order], key, arrays)}
    items = [
        _encode(part, f"{key}/{place}", arrays, model)
        for place, part in enumerate(map(list, value.items()) if isinstance(value, dict) else value)
    ]
    return items if type(value) is list else {"kind": kind, "items": items}


def _decode(value: Any, arrays: dict[str, np.ndarray], own: Any, model: keras.Model) -> Any:
    """Returns what `_encode` was given: `own`, with other items, if it is of that kind.

    Raises:
        LookupError: if `own` is not, and one cannot be made of its items alone.
    """
    if not isinstance(value, (list, dict)):
        return value
    if isinstance(value, dict) and value.keys() == {"array"} and value["array"] in arrays:
        return arrays[value["array"]]
    if isinstance(value, dict) and value.keys() == {"weights"} and len(value["weights"]) == len(model.weights):
        order = _order_of_names(model)
        return [_decode(value["weights"][order.index(place)], arrays, None, model) for place in range(len(order))]
    if isinstance(value, list):
        kind, items = "list", value
    elif value.keys() == {"kind", "items"}:
        kind, items = value["kind"], value["items"]
    else:
        kind, items = type(own).__name__ if isinstance(own, dict) else "dict", list(map(list, value.items()))
    if type(own).__name__ != kind:
        own = None
    made: list[Any]
    if isinstance(own, dict) or issubclass(_MADE_OF_ITEMS.get(kind, object), dict):
        names = [_decode(name, arrays, None, model) for name, _ in items]
        made = [
            (name, _decode(part, arrays, _copied((own or {}).get(name)), model))
            for name, (_, part) in zip(names, items)
        ]
    else:
        known = list(own) if isinstance(own, (list, tuple, collections.deque)) else []
        known += [None] * len(items)
        made = [_decode(part, arrays, _copied(known[place]), model) for place, part in enumerate(items)]
    return _with_items(own, kind, made)


def _copied(own: Any) -> Any:
    """Returns what may take other items without a change to what it is a copy of."""
    return copy.copy(own) if isinstance(own, _HOLDING) else None


def _with_items(own: Any, kind: str, items: list[Any]) -> Any:
    if own is None or isinstance(own, (tuple, frozenset)):
        return _MADE_OF_ITEMS[kind](dict(items) if kind == "Counter" else items)  # it would count the pairs
    own.clear()
    if isinstance(own, dict):
        for name, part in items:  # a Counter's `update` adds
            own[name] = part
    elif isinstance(own, set):
        own.update(items)
    else:
        own.extend(items)
    return own
