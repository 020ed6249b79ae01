"""Gathers and restores the state of a training, in NumPy and JSON, the same on every backend and device count."""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat import all_layers, inner_optimizer, learning_rate_schedule, without_tensorflow
from kerasdp.portability.portable import batch_norms

# What two runs must have in common for one to resume the other.
_FLAGS = ("dataset", "seed", "batch_norm", "optimizer", "learning_rate", "lr_base_batch", "kernel_initializer")
# Of Keras' `Callback`, or set anew by each `fit`.
_NOT_STATE = ("_model", "params", "validation_data")


GROUPS = ("model", "optimizer", "loss_scale", "metrics")


def gather(model: keras.Model, groups: Iterable[str] = GROUPS) -> dict[str, np.ndarray]:
    """Copies of all variables: of the model (seeds of random layers among them), the optimizer and the metrics.

    The names are `group/place path`, the path without the numbers by which Keras tells instances apart.
    """
    variables = _groups(model)
    return {key: _to_numpy(variable) for group in groups for key, variable in _keyed(group, variables[group])}


def restore(model: keras.Model, arrays: dict[str, np.ndarray], groups: Iterable[str]) -> None:
    """Gives variables the values that `gather` took, in whatever precision they have now.

    Args:
        model: built and, for the groups other than `"model"`, compiled.
        arrays: as `gather` gave them.
        groups: of `GROUPS`; `"loss_scale"` is skipped where there is none.

    Raises:
        UserError: if the model or the optimizer has other variables than were saved.
    """
    variables = _groups(model)
    for group in groups:
        known = {key: array for key, array in arrays.items() if key.startswith(f"{group}/")}
        keyed = _keyed(group, variables[group])
        if group == "loss_scale" and not (known and keyed):
            continue
        own = {key: tuple(variable.shape) for key, variable in keyed}
        odd = next((key for key in (*own, *known) if key not in known or own.get(key) != known[key].shape), None)
        if odd is not None:
            raise UserError(
                f"the checkpoint is of another {group}: {odd} has shape {known[odd].shape if odd in known else 'none'} "
                f"there, {own.get(odd, 'none')} here"
            )
        for key, variable in keyed:
            variable.assign(known[key].astype(keras.backend.standardize_dtype(variable.dtype)))


def _groups(model: keras.Model) -> dict[str, list[Any]]:
    groups = {"model": model.variables, "optimizer": [], "loss_scale": [], "metrics": model.metrics_variables}
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        groups["optimizer"] = optimizer.inner_optimizer.variables
        inner = {id(variable) for variable in groups["optimizer"]}
        groups["loss_scale"] = [variable for variable in optimizer.variables if id(variable) not in inner]
    elif optimizer is not None:
        groups["optimizer"] = optimizer.variables
    return groups


def _keyed(group: str, variables: list[Any]) -> list[tuple[str, Any]]:
    keyed = []
    for place, variable in enumerate(variables):
        # A slot's path holds its optimizer's name, and, in one word, that of the variable it belongs to.
        path = variable.path.rpartition("/")[2] if group in ("optimizer", "loss_scale") else variable.path
        keyed.append((f"{group}/{place:04d} {_without_numbers(path)}", variable))
    return keyed


def _without_numbers(name: str) -> str:
    return re.sub(r"_\d+(?=$|/|_)", "", name)


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
    """Returns a digest of layers and their arguments, without what depends on names, precision and process."""
    parts = []
    for layer in all_layers(model, include_self=False):
        arguments = {} if isinstance(layer, keras.Model) else _arguments(layer)
        parts.append([type(layer).__name__, _comparable(arguments)])
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
    callbacks: list[keras.callbacks.Callback], begin: list[dict[str, str]], arrays: dict[str, np.ndarray]
) -> dict[str, dict[str, Any]]:
    """Returns the state of each callback: its attributes that changed, if they are numbers, text, arrays, or lists or
    dictionaries of such.

    Args:
        callbacks: of the run.
        begin: of each, what `plain_attributes` gave when the run began.
        arrays: takes the arrays, which the result then names.
    """
    states = {}
    for key, callback, known in zip(_callback_keys(callbacks), callbacks, begin):
        state = {}
        for name, value in vars(callback).items():
            if name in _NOT_STATE:
                continue
            found: dict[str, np.ndarray] = {}
            try:
                encoded = _encode(value, f"callbacks/{key}/{name}", found)
            except TypeError:
                continue
            if found or json.dumps(encoded) != known.get(name):
                state[name] = encoded
                arrays.update(found)
        if state:
            states[key] = state
    return states


def restore_callbacks(
    callbacks: list[keras.callbacks.Callback], states: dict[str, dict[str, Any]], arrays: dict[str, np.ndarray]
) -> None:
    """Gives callbacks the state that `callback_states` took; one that is new keeps its own."""
    for key, callback in zip(_callback_keys(callbacks), callbacks):
        for name, value in states.get(key, {}).items():
            setattr(callback, name, _decode(value, arrays))


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
