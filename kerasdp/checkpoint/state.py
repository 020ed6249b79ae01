"""Gathers and restores what a checkpoint holds, in NumPy and JSON: the same on every backend and device count.

That is the variables, the identity of the run, the callbacks' attributes, and the layers of the model.

A callback's attributes in JSON: `{"array": key}` stands for an array, `{"weights": [...]}` for arrays like the weights
of the model, and `{"kind": class, "items": [...]}` for a container other than a list. A user's dictionary has the last
form, whatever it contains.
"""

import contextlib
import json
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from kerasdp.checkpoint.names import GROUPS, arguments_of, comparable, in_words, is_unsure, named, names_in
from kerasdp.config import Config
from kerasdp.data.sources import digest_of
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import frozen_weights, is_of_keras
from kerasdp.keras_compat.models import as_functional
from kerasdp.keras_compat.optimizers import inner_optimizer, learning_rate_schedule
from kerasdp.keras_compat.saving import safe_deserialization
from kerasdp.keras_compat.settings import without_tensorflow
from kerasdp.same.portable import batch_norms

# `kerasdp.contract.Strategy.read`.
Read = Callable[[keras.Model, list[Any], Callable[[Any], Any]], list[Any]]
# What the identity of a run calls the digest of weights that its checkpoints leave out.
FROZEN = "the frozen weights"
# What two runs must have in common for one to resume the other.
_FLAGS = ("seed", "batch_norm")


def variables_of(model: keras.Model, groups: Iterable[str] = GROUPS) -> dict[str, Any]:
    """Returns all variables: of the model (seeds of random layers among them), the optimizer and the metrics.

    They are named as in `kerasdp.checkpoint.names`.
    """
    return {name: variable for group in groups for name, variable in named(model, group)}


def frozen(model: keras.Model) -> dict[str, Any]:
    """Returns the weights of a model that were made to train, and do not, by name."""
    known = {id(variable) for variable in frozen_weights(model)}
    return {name: variable for name, variable in named(model, "model") if id(variable) in known}


def digest_of_frozen(model: keras.Model, read: Read) -> str:
    """Returns a digest of the names and values of the weights of `frozen`."""
    of_names = dict(sorted(frozen(model).items()))
    digests = read(model, list(of_names.values()), lambda value: digest_of([to_numpy(value)]))
    return digest_of(map(_as_bytes, (*of_names, *digests)))


def restore(
    model: keras.Model, arrays: dict[str, np.ndarray], groups: Iterable[str], without: Collection[str] = frozenset()
) -> None:
    """Gives variables the values that `to_numpy` took, in whatever precision they have now.

    Args:
        model: built and, for the groups other than `"model"`, compiled.
        arrays: by the names of `variables_of`.
        groups: of `GROUPS`; `"loss_scale"` is skipped where there is none.
        without: names of variables that the arrays leave out.

    Raises:
        UserError: if the model or the optimizer has other variables than were saved, or some that share a name.
    """
    for group in groups:
        known = {name: array for name, array in arrays.items() if name.startswith(f"{group}/")}
        variables = [pair for pair in named(model, group) if pair[0] not in without]
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
                "be told; give each layer a name or an attribute of its own, and train again"
            )
        for name, variable in variables:
            kind = keras.backend.standardize_dtype(variable.dtype)
            # NumPy alone has no bfloat16: Keras makes it of float32.
            variable.assign(known[name].astype("float32" if kind == "bfloat16" else kind))


def to_numpy(variable: Any) -> np.ndarray:
    """Returns a copy of the value of a variable, or a tensor; of bfloat16 in float32."""
    array = np.array(keras.ops.convert_to_numpy(variable))  # a copy: the next step writes over what it came from
    return array if array.dtype.kind in "fiub" else array.astype("float32")  # bfloat16 is a type of its own


def identity(config: Config, model: keras.Model, reader: Any, read: Read) -> dict[str, Any]:
    """Returns what must be the same for a run to resume: choices, model, optimizer, data, in words or as digests.

    Args:
        config: the run's choices.
        model: built and compiled.
        reader: of the training data, as in `kerasdp.data.batch`.
        read: gives the weights of the model.
    """
    batch = reader.first()
    # Rank 0 computes it: it holds the first row whatever the number of processes.
    first_row = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:1], batch.inputs)
    data = keras.tree.flatten((batch.indices, first_row, *reader.sample(len(batch.indices))[1:]))
    found = {f"--{name}": getattr(config, name) for name in _FLAGS}
    found |= {"global batch": len(batch.indices), "batches an epoch": reader.num_batches}
    found["first batch of the data"] = digest_of(leaf for leaf in data if leaf is not None)
    with without_tensorflow():
        found |= {"model": _architecture(model), "loss": in_words(model.loss)}
        found["optimizer"], found["learning rate"] = _optimizer_in_words(model.optimizer)
        for where, other in names_in(model).optimizers:
            found[f"{where} of the model"] = list(_optimizer_in_words(other))
    if reader.split.micro_batch_rows is not None and batch_norms(model):
        found["rows that a batch norm sees"] = reader.split.micro_batch_rows
    if held := frozen(model):
        names = sorted(name for name, variable in named(model, "model") if variable.trainable and name not in held)
        found["the weights that train"] = digest_of(map(_as_bytes, names))
    if config.checkpoint_weights != "all":
        found |= {"--checkpoint_weights": config.checkpoint_weights, FROZEN: digest_of_frozen(model, read)}
    return found


def _optimizer_in_words(optimizer: Any) -> tuple[Any, Any]:
    """Returns an optimizer by its arguments, and its learning rate or schedule."""
    optimizer = inner_optimizer(optimizer)
    schedule = learning_rate_schedule(optimizer)
    words = in_words(optimizer, without=("learning_rate", "loss_scale_factor"))
    if schedule is not None:
        return words, in_words(schedule)
    return words, float(np.float32(keras.ops.convert_to_numpy(optimizer.learning_rate)))


def check_identity(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises `UserError` if two identities differ, with the first difference."""
    absent = {"--checkpoint_weights": "all", "the weights that train": "of all"}
    saved, own = absent | saved, absent | own
    for name in dict.fromkeys((*saved, *own)):
        if saved.get(name) != own.get(name):
            raise UserError(
                f"--resume: this run differs from the one in the workdir in {name}: expected {saved.get(name)!s:.300}. "
                f"Received: {own.get(name)!s:.300}; backend, devices and precision may change, this may not; a new run "
                "can begin with its weights, which recipes/export.py writes"
            )


def _architecture(model: keras.Model) -> str:
    """Returns a digest of layers and their arguments, without what depends on precision, process and backend."""
    parts = []
    for name, layer in sorted(names_in(model).layers, key=lambda pair: pair[0]):
        arguments = {} if isinstance(layer, keras.Model) else arguments_of(layer)
        parts.append([*([name] if name else []), type(layer).__name__, comparable(arguments)])
    return digest_of([_as_bytes(json.dumps(parts, sort_keys=True))])


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), "uint8")


# Attributes of Keras' `Callback`, or set by each `fit`.
_NOT_STATE = ("_model", "params", "validation_data")
_PLAIN = (bool, int, float, str, type(None))
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, dict, set, frozenset)}


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
    states: dict[str, dict[str, Any]] = {}
    for key, callback, known in zip(_callback_keys(callbacks), callbacks, begin):
        for name, value, found in _encoded_attributes(callback, key, model):
            if found or json.dumps(value) != known.get(name):
                states.setdefault(key, {})[name] = value
                arrays.update(found)
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
            if _may_be_restored(callback, name, value):
                setattr(callback, name, _decode(value, arrays, model))


def _may_be_restored(callback: keras.callbacks.Callback, name: str, value: Any) -> bool:
    """Returns whether a file may say an attribute: data, but no function, and no text of Keras' own callbacks.

    Keras' own are places to write to, which only the user who made the callback may choose.
    """
    own = vars(callback).get(name, getattr(type(callback), name, None))
    if name in _NOT_STATE or name.startswith("__") or callable(own) or hasattr(own, "__set__"):  # of a property
        return False
    return not (isinstance(value, str) and is_of_keras(type(callback)))


def plain_attributes(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Returns a callback's attributes that can be saved, in JSON, without the values of arrays."""
    return {name: json.dumps(value) for name, value, _ in _encoded_attributes(callback)}


def unsaved_attributes(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Returns a user-defined callback's attributes that cannot be saved, as Python shows them."""
    if is_of_keras(type(callback)):  # Keras' own callbacks make their files and functions again
        return {}
    others = vars(callback).keys() - plain_attributes(callback).keys() - set(_NOT_STATE)
    return {name: repr(getattr(callback, name)) for name in sorted(others)}


def _encoded_attributes(
    callback: keras.callbacks.Callback, key: str = "", model: keras.Model | None = None
) -> Iterator[tuple[str, Any, dict[str, np.ndarray]]]:
    """Yields name, value as JSON can hold it, and arrays of each attribute that can be saved."""
    for name in [name for name in vars(callback) if name not in _NOT_STATE]:
        arrays: dict[str, np.ndarray] = {}
        with contextlib.suppress(TypeError, RecursionError):
            yield name, _encode(vars(callback)[name], f"callbacks/{key}/{name}", arrays, model), arrays


def _order_of_names(model: keras.Model) -> list[int]:
    """Returns the places of a model's weights in `model.weights`, by the order of their names."""
    names = names_in(model).variables
    weights = model.weights
    return sorted(range(len(weights)), key=lambda place: names[id(weights[place])])


def _callback_keys(callbacks: list[keras.callbacks.Callback]) -> list[str]:
    """Returns a key for each callback, by class and number: the processes of a run may hold different callbacks."""
    names = [type(callback).__name__ for callback in callbacks]
    return [f"{name}/{names[:place].count(name)}" for place, name in enumerate(names)]


def _encode(value: Any, key: str, arrays: dict[str, np.ndarray], model: keras.Model | None = None) -> Any:
    """Returns a value as JSON can hold it, copies of its arrays in `arrays`; `TypeError` if it cannot be saved."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.generic) and isinstance(value.item(), _PLAIN):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub" and value.dtype.itemsize <= 8:
        arrays[key] = value.copy()
        return {"array": key}
    kind = type(value).__name__
    if _COLLECTIONS.get(kind) is not type(value):
        raise TypeError
    if model is not None and kind == "list" and _is_like_weights(value, model):
        return {"weights": _encode([value[place] for place in _order_of_names(model)], key, arrays)}
    items = [
        _encode(part, f"{key}/{place}", arrays, model)
        for place, part in enumerate(map(list, value.items()) if isinstance(value, dict) else value)
    ]
    return items if kind == "list" else {"kind": kind, "items": items}


def _is_like_weights(value: list[Any], model: keras.Model) -> bool:
    """Returns whether a list holds arrays of the shapes of the model's weights."""
    shapes = [tuple(part.shape) for part in value if isinstance(part, np.ndarray)]
    return len(shapes) == len(value) > 0 and shapes == [tuple(weight.shape) for weight in model.weights]


def _decode(value: Any, arrays: dict[str, np.ndarray], model: keras.Model) -> Any:
    """Returns what `_encode` was given."""
    if isinstance(value, list):
        return [_decode(item, arrays, model) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "weights" in value:
        order = _order_of_names(model)
        return [_decode(value["weights"][order.index(place)], arrays, model) for place in range(len(order))]
    return _COLLECTIONS[value["kind"]](_decode(value["items"], arrays, model))


# What models are made of, among Keras' public modules. Its others read, write and connect when they are called.
_OF_MODELS = {
    "activations", "constraints", "dtype_policies", "initializers", "layers", "losses", "metrics", "models", "ops",
    "optimizers", "quantizers", "random", "regularizers", "src",
}  # fmt: skip


def architecture_of(model: keras.Model) -> dict[str, Any] | None:
    """Returns the layers of a model and how they are connected, as JSON can hold it; None if that cannot be said.

    It cannot of a model that is no graph, nor of a `lambda`, which Keras writes as code that it does not run again.

    Of layers in the precision of the run it says none: they take that of the run that builds the model.
    """
    if as_functional(model) is None:
        return None
    try:
        with without_tensorflow(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras (3.15) warns of a lambda
            found = keras.saving.serialize_keras_object(model)
        found.pop("compile_config", None)
        text = json.dumps(_without_precision(found))
        return None if '"__lambda__"' in text else json.loads(text)
    except (TypeError, ValueError, NotImplementedError, AttributeError):  # a layer whose arguments are not known
        return None


def build_architecture(architecture: dict[str, Any]) -> keras.Model:
    """Builds the model of `architecture_of`, with new weights.

    Names in it are those of Keras' own layers, and of classes that are registered here; nothing runs that is not.

    Raises:
        Exception: whatever Keras raises of a layer that it does not know.
    """
    _check_class_names(architecture)
    with safe_deserialization():
        return keras.saving.deserialize_keras_object(architecture, safe_mode=True)


def load_keras_file(path: str) -> keras.Model:
    """Loads a `.keras` file, with the names that `build_architecture` takes.

    Raises:
        Exception: whatever Keras raises of a file that is none, or a layer that it does not know.
    """
    with zipfile.ZipFile(path) as archive:
        _check_class_names(json.loads(archive.read("config.json")))
    with safe_deserialization():
        return keras.saving.load_model(path, compile=False, safe_mode=True)


def _check_class_names(part: Any) -> None:
    """Raises `ValueError` if a description of a model names a function of Keras that is no part of models."""
    for each in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
        _check_class_names(each)
    if isinstance(part, dict) and isinstance(part.get("module"), str):
        own = part.get("config") if part.get("class_name") == "function" else part.get("class_name")
        name = f"{part['module']}.{own}".split(".")
        if name[0] == "keras" and len(name) > 2 and name[1] not in _OF_MODELS:
            raise ValueError(f"{'.'.join(name)} is no part of a model")


def _without_precision(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_precision(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        name: _without_precision(value)
        for name, value in part.items()
        if not (name == "dtype" and _is_of_run(value, part))
    }


def _is_of_run(value: Any, part: dict[str, Any]) -> bool:
    if isinstance(value, dict):
        return value.get("config", {}).get("name") == keras.config.dtype_policy().name
    return "batch_shape" in part and value == keras.config.floatx()  # of an input
