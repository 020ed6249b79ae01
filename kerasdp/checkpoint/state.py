"""Gathers and restores the state of a training, in NumPy and JSON, the same on every backend and device count."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from kerasdp.checkpoint.names import GROUPS, is_unsure, named, names_in
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat import inner_optimizer, learning_rate_schedule, without_tensorflow
from kerasdp.portability.portable import batch_norms

# What two runs must have in common for one to resume the other.
_FLAGS = ("dataset", "seed", "batch_norm", "optimizer", "learning_rate", "lr_base_batch", "kernel_initializer")
# Of Keras' `Callback`, or set anew by each `fit`.
_NOT_STATE = ("_model", "params", "validation_data")


def gather(model: keras.Model, groups: Iterable[str] = GROUPS) -> dict[str, np.ndarray]:
    """Returns copies of all variables: of the model (seeds of random layers among them), the optimizer and the metrics.

    They are named as in `kerasdp.checkpoint.names`.
    """
    return {name: _to_numpy(variable) for group in groups for name, variable in named(model, group)}


def restore(model: keras.Model, arrays: dict[str, np.ndarray], groups: Iterable[str]) -> None:
    """Gives variables the values that `gather` took, in whatever precision they have now.

    Args:
        model: built and, for the groups other than `"model"`, compiled.
        arrays: as `gather` gave them.
        groups: of `GROUPS`; `"loss_scale"` is skipped where there is none.

    Raises:
        UserError: if the model or the optimizer has other variables than were saved, or some that share a name.
    """
    for group in groups:
        known = {name: array for name, array in arrays.items() if name.startswith(f"{group}/")}
        variables = named(model, group)
        if group == "loss_scale" and not (known and variables):
            continue
        own = {name: tuple(variable.shape) for name, variable in variables}
        odd = next((name for name in (*own, *known) if name not in known or own.get(name) != known[name].shape), None)
        if odd is not None:
            raise UserError(
                f"the checkpoint is of another {group}: {odd} has shape {known[odd].shape if odd in known else 'none'} "
                f"there, {own.get(odd, 'none')} here"
            )
        unsure = next(filter(is_unsure, own), None)
        if unsure is not None:
            raise UserError(
                f"the checkpoint has several {unsure.rpartition(' ')[0]}, and {model.name} too: which is which cannot "
                "be told; give each layer a name or an attribute of its own, and train anew"
            )
        for name, variable in variables:
            variable.assign(known[name].astype(keras.backend.standardize_dtype(variable.dtype)))


def _to_numpy(variable: Any) -> np.ndarray:
    array = np.array(keras.ops.convert_to_numpy(variable))  # a copy: the next step writes over what it came from
    return array if array.dtype.kind in "fiub" else array.astype("float32")  # bfloat16 is a type of its own


def identity(config: Config, model: keras.Model, reader: Any, micro_batch_rows: int | None = None) -> dict[str, Any]:
    """Returns what must be the same for a run to resume: choices, model, optimizer, data, in words or as digests.

    Args:
        config: the run's choices.
        model: built and compiled.
        reader: of the training data, as in `kerasdp.data.feed`.
        micro_batch_rows: that a layer sees, if neither the global batch nor a replica's part of it.
    """
    with without_tensorflow():
        found = _identity(config, model, reader)
    if micro_batch_rows is not None and batch_norms(model):
        found["rows that a batch norm sees"] = micro_batch_rows
    return found


def _identity(config: Config, model: keras.Model, reader: Any) -> dict[str, Any]:
    batch = reader.first()
    optimizer = inner_optimizer(model.optimizer)
    schedule = learning_rate_schedule(optimizer)
    if schedule is None:
        rate = float(np.float32(keras.ops.convert_to_numpy(optimizer.learning_rate)))
    # Of rank 0, which holds the first row whatever the number of processes.
    first_row = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:1], batch.inputs)
    data = keras.tree.flatten((batch.indices, first_row, batch.targets, batch.sample_weight))
    return {
        **{f"--{name}": getattr(config, name) for name in _FLAGS},
        "global batch": len(batch.indices),
        "batches an epoch": reader.num_batches,
        "first batch of the data": _digest(leaf for leaf in data if leaf is not None),
        "model": _architecture(model),
        "loss": _in_words(model.loss),
        "optimizer": _in_words(optimizer, without=("learning_rate", "loss_scale_factor")),
        "learning rate": rate if schedule is None else _in_words(schedule),
    }


def _in_words(thing: Any, without: tuple[str, ...] = ()) -> str:
    """Returns kind and arguments of a Keras object in words; only the kind if it has no config."""
    if isinstance(thing, (dict, list, tuple)):
        return json.dumps(keras.tree.flatten(keras.tree.map_structure(_in_words, thing)))
    arguments = {name: value for name, value in _arguments(thing).items() if name not in without}
    name = thing if isinstance(thing, str) else getattr(thing, "__name__", type(thing).__name__)
    return f"{name} {json.dumps(_comparable(arguments), sort_keys=True)}"


def check_identity(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises `UserError` if two identities differ, with the first difference."""
    for name in dict.fromkeys((*saved, *own)):
        if saved.get(name) != own.get(name):
            raise UserError(
                f"--resume: this run differs from the one in the workdir in {name}: expected {saved.get(name)}. "
                f"Received: {own.get(name)}; backend, devices and precision may change, this may not"
            )


def _architecture(model: keras.Model) -> str:
    """Returns a digest of layers and their arguments, without what depends on precision, process and backend."""
    return digest_of_layers(sorted(names_in(model).layers, key=lambda pair: pair[0]))


def digest_of_layers(layers: Iterable[tuple[str, keras.layers.Layer]]) -> str:
    """Returns a digest of layers with their names and arguments."""
    parts = []
    for name, layer in layers:
        arguments = {} if isinstance(layer, keras.Model) else _arguments(layer)
        parts.append([*([name] if name else []), type(layer).__name__, _comparable(arguments)])
    return _digest([np.frombuffer(json.dumps(parts, sort_keys=True).encode(), "uint8")])


def _arguments(thing: Any) -> dict[str, Any]:
    """Returns the arguments of a Keras object; none if it has no config, as a user-defined layer may."""
    try:
        return getattr(thing, "get_config", dict)()
    except NotImplementedError:  # what Keras raises where a class has none of its own
        return {}


def _comparable(value: Any) -> Any:
    if isinstance(value, dict):
        skipped = ("name", "dtype", "seed", "module", "registered_name", "build_config", "trainable")
        return {str(name): _comparable(part) for name, part in value.items() if name not in skipped}
    if isinstance(value, (list, tuple)):
        return [_comparable(part) for part in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def _digest(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        # Data may come in the precision of the run.
        array = np.ascontiguousarray(array.astype("float32") if array.dtype.kind == "f" else array)
        digest.update(f"{array.shape}".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()[:16]


def callback_states(
    callbacks: list[keras.callbacks.Callback],
    begin: list[dict[str, str]],
    arrays: dict[str, np.ndarray],
    model: keras.Model,
) -> dict[str, dict[str, Any]]:
    """Returns the state of each callback: its attributes that changed, if they are numbers, text, arrays, or lists or
    dictionaries of such.

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
        for name, value in vars(callback).items():
            if name in _NOT_STATE:
                continue
            found: dict[str, np.ndarray] = {}
            try:
                order = _canonical_order(model, value)
                ordered = value if order is None else [value[place] for place in order]
                encoded = _encode(ordered, f"callbacks/{key}/{name}", found)
            except TypeError:
                continue
            if found or json.dumps(encoded) != known.get(name):
                state[name] = encoded if order is None else {"weights": encoded}
                arrays.update(found)
        if state:
            states[key] = state
    return states


def restore_callbacks(
    callbacks: list[keras.callbacks.Callback],
    states: dict[str, dict[str, Any]],
    arrays: dict[str, np.ndarray],
    model: keras.Model,
) -> None:
    """Gives callbacks the state that `callback_states` took; one that is new keeps its own."""
    for key, callback in zip(_callback_keys(callbacks), callbacks):
        for name, value in states.get(key, {}).items():
            if isinstance(value, dict) and value.keys() == {"weights"}:
                saved = _decode(value["weights"], arrays)
                order = _order_of_names(model)
                setattr(callback, name, [saved[order.index(place)] for place in range(len(order))])
            else:
                setattr(callback, name, _decode(value, arrays))


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


def plain_attributes(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Returns a callback's attributes that JSON can hold, in JSON."""
    found = {}
    for name, value in vars(callback).items():
        try:
            found[name] = json.dumps(_encode(value, "", {}))
        except TypeError:
            continue
    return found


def _callback_keys(callbacks: list[keras.callbacks.Callback]) -> list[str]:
    """Returns a key for each callback, by class and number: the processes of a run may hold different callbacks."""
    names = [type(callback).__name__ for callback in callbacks]
    return [f"{name}/{names[:place].count(name)}" for place, name in enumerate(names)]


def _encode(value: Any, key: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_encode(part, f"{key}/{place}", arrays) for place, part in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _encode(part, f"{key}/{name}", arrays) for name, part in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        arrays[key] = value.copy()
        return {"array": key}
    raise TypeError


def _decode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(part, arrays) for part in value]
    if isinstance(value, dict):
        if value.keys() == {"array"} and value["array"] in arrays:
            return arrays[value["array"]]
        return {name: _decode(part, arrays) for name, part in value.items()}
    return value
