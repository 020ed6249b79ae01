"""Collects and restores the content of a checkpoint: variables, identity of the run, callbacks, and layers.

The content consists of NumPy arrays and JSON values. It is the same on every backend and number of devices.

Attributes of callbacks are encoded as JSON. `{"array": key}` stands for an array. `{"weights": [...]}` stands for a
list of arrays with the shapes of the model's weights. `{"kind": class, "items": [...]}` stands for a dictionary, a
tuple or a set.
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
    """Returns the variables of the model, the optimizers and the metrics, by name.

    The variables of the model include the seeds of random layers. `kerasdp.checkpoint.names` defines the names.
    """
    return {name: variable for group in groups for name, variable in named(model, group)}


def frozen(model: keras.Model) -> dict[str, Any]:
    """Returns the frozen weights of a model, by name: weights that were created as trainable and are now frozen."""
    known = {id(variable) for variable in frozen_weights(model)}
    return {name: variable for name, variable in named(model, "model") if id(variable) in known}


def digest_of_frozen(model: keras.Model, read: Read) -> str:
    """Returns a digest of the names and values of the frozen weights."""
    of_names = dict(sorted(frozen(model).items()))
    digests = read(model, list(of_names.values()), lambda value: digest_of([to_numpy(value)]))
    return digest_of(map(_as_bytes, (*of_names, *digests)))


def restore(
    model: keras.Model, arrays: dict[str, np.ndarray], groups: Iterable[str], without: Collection[str] = frozenset()
) -> None:
    """Assigns the arrays of a checkpoint to variables, and converts each array to the dtype of the variable.

    Args:
        model: a built model. For all groups except `"model"`, the model must be compiled, too.
        arrays: arrays of a checkpoint, by name of the variable as in `variables_of`.
        groups: groups of variables from `GROUPS`. `"loss_scale"` is skipped if the model or the checkpoint has no loss
            scale.
        without: names of variables that the checkpoint does not contain.

    Raises:
        UserError: if the names or the shapes of the variables differ from the checkpoint; if several variables have
            the same name.
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
                f"the checkpoint does not fit the {group}: {odd} has shape "
                f"{known[odd].shape if odd in known else 'none'} in the checkpoint, and shape {own.get(odd, 'none')} "
                f"in this program; use the same {group} as the saved run"
            )
        unsure = next(filter(is_unsure, own), None)
        if unsure is not None:
            raise UserError(
                f"the checkpoint and {model.name} both have several variables called {unsure.rpartition(' ')[0]}; give "
                "each layer a unique name or store it in an attribute, and train again"
            )
        for name, variable in variables:
            kind = keras.backend.standardize_dtype(variable.dtype)
            # NumPy alone has no bfloat16: Keras makes it of float32.
            variable.assign(known[name].astype("float32" if kind == "bfloat16" else kind))


def to_numpy(variable: Any) -> np.ndarray:
    """Returns a NumPy copy of the value of a variable or tensor. bfloat16 is converted to float32."""
    array = np.array(keras.ops.convert_to_numpy(variable))  # a copy: the next step writes over what it came from
    return array if array.dtype.kind in "fiub" else array.astype("float32")  # bfloat16 is a type of its own


def identity(config: Config, model: keras.Model, reader: Any, read: Read) -> dict[str, Any]:
    """Returns the facts that must be the same when a run resumes: flags, model, optimizer and data, as text or digests.

    Args:
        config: configuration of the run.
        model: a built and compiled model.
        reader: reader of the training data, as in `kerasdp.data.batch`.
        read: function that reads the weights of the model.
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
    """Returns a text with the class and the arguments of an optimizer, and its learning rate or schedule."""
    optimizer = inner_optimizer(optimizer)
    schedule = learning_rate_schedule(optimizer)
    words = in_words(optimizer, without=("learning_rate", "loss_scale_factor"))
    if schedule is not None:
        return words, in_words(schedule)
    return words, float(np.float32(keras.ops.convert_to_numpy(optimizer.learning_rate)))


def check_identity(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises a `UserError` with the first difference if the identities of the saved run and this run differ."""
    absent = {"--checkpoint_weights": "all", "the weights that train": "of all"}
    saved, own = absent | saved, absent | own
    for name in dict.fromkeys((*saved, *own)):
        if saved.get(name) != own.get(name):
            raise UserError(
                f"--resume: this run differs from the run in the workdir in {name}: expected {saved.get(name)!s:.300}. "
                f"Received: {own.get(name)!s:.300}. Only backend, devices and precision may change. To start a new run "
                "from the saved weights, export the weights with kerasdp export"
            )


def _architecture(model: keras.Model) -> str:
    """Returns a digest of the layers of a model and of the arguments that are the same on every backend."""
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
    """Returns the attributes of each callback that have changed and can be saved, in JSON types.

    Numbers, text, arrays, and containers of these types can be saved.

    Args:
        callbacks: callbacks of the run.
        begin: for each callback, the result of `plain_attributes` at the start of the run.
        arrays: dictionary to which the arrays are added. The result refers to the arrays by key.
        model: model of the run. Lists of arrays with the shapes of its weights, such as the best weights of
            `EarlyStopping`, are saved in an order that is the same on every backend.
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
    """Restores callback attributes from the result of `callback_states`. Callbacks without an entry do not change."""
    for key, callback in zip(_callback_keys(callbacks), callbacks):
        for name, value in states.get(key, {}).items():
            if _may_be_restored(callback, name, value):
                setattr(callback, name, _decode(value, arrays, model))


def _may_be_restored(callback: keras.callbacks.Callback, name: str, value: Any) -> bool:
    """Returns whether a checkpoint may set an attribute of a callback.

    A checkpoint may set data, but no functions and no properties. It may not set text attributes of built-in Keras
    callbacks, because these texts are paths of files, which only the user may choose.
    """
    own = vars(callback).get(name, getattr(type(callback), name, None))
    if name in _NOT_STATE or name.startswith("__") or callable(own) or hasattr(own, "__set__"):  # of a property
        return False
    return not (isinstance(value, str) and is_of_keras(type(callback)))


def plain_attributes(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Returns the attributes of a callback that can be saved, as JSON texts by name, without the values of arrays."""
    return {name: json.dumps(value) for name, value, _ in _encoded_attributes(callback)}


def unsaved_attributes(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Returns the attributes of a custom callback that cannot be saved, as `repr` texts by name."""
    if is_of_keras(type(callback)):  # Keras' own callbacks make their files and functions again
        return {}
    others = vars(callback).keys() - plain_attributes(callback).keys() - set(_NOT_STATE)
    return {name: repr(getattr(callback, name)) for name in sorted(others)}


def _encoded_attributes(
    callback: keras.callbacks.Callback, key: str = "", model: keras.Model | None = None
) -> Iterator[tuple[str, Any, dict[str, np.ndarray]]]:
    """Yields a tuple for each attribute that can be saved: its name, its value in JSON types, and its arrays."""
    for name in [name for name in vars(callback) if name not in _NOT_STATE]:
        arrays: dict[str, np.ndarray] = {}
        with contextlib.suppress(TypeError, RecursionError):
            yield name, _encode(vars(callback)[name], f"callbacks/{key}/{name}", arrays, model), arrays


def _order_of_names(model: keras.Model) -> list[int]:
    """Returns the indices of a model's weights in `model.weights`, sorted by the names of the weights."""
    names = names_in(model).variables
    weights = model.weights
    return sorted(range(len(weights)), key=lambda place: names[id(weights[place])])


def _callback_keys(callbacks: list[keras.callbacks.Callback]) -> list[str]:
    """Returns a key for each callback: the name of its class, and a counter among callbacks of the same class.

    A position in the list would not identify a callback, because processes of a run may have different callbacks.
    """
    names = [type(callback).__name__ for callback in callbacks]
    return [f"{name}/{names[:place].count(name)}" for place, name in enumerate(names)]


def _encode(value: Any, key: str, arrays: dict[str, np.ndarray], model: keras.Model | None = None) -> Any:
    """Converts a value to JSON types, and adds copies of its arrays to `arrays`.

    Raises:
        TypeError: if the value cannot be saved.
    """
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
    """Returns whether a list consists of arrays with the same shapes as the model's weights, in the same order."""
    shapes = [tuple(part.shape) for part in value if isinstance(part, np.ndarray)]
    return len(shapes) == len(value) > 0 and shapes == [tuple(weight.shape) for weight in model.weights]


def _decode(value: Any, arrays: dict[str, np.ndarray], model: keras.Model) -> Any:
    """Converts a result of `_encode` back to the original value."""
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


# Public modules of Keras that models consist of. Functions of other modules may read and write files or use networks.
_OF_MODELS = {
    "activations", "constraints", "dtype_policies", "initializers", "layers", "losses", "metrics", "models", "ops",
    "optimizers", "quantizers", "random", "regularizers", "src",
}  # fmt: skip


def architecture_of(model: keras.Model) -> dict[str, Any] | None:
    """Returns the layers of a model and their connections in JSON types; None if Keras cannot rebuild the model.

    Keras cannot rebuild a model that is not a graph of layers, or that contains a `lambda`: it saves the code of a
    lambda, but does not run this code again.

    A layer in the precision of the run is saved without a precision. A rebuilt layer gets the precision of the run that
    rebuilds the model.
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
    """Builds a model from the result of `architecture_of`, with new weights.

    The model may contain layers of Keras, and classes that are registered in this program. No other code is run.

    Raises:
        Exception: any error of Keras for an unknown layer.
    """
    _check_class_names(architecture)
    with safe_deserialization():
        return keras.saving.deserialize_keras_object(architecture, safe_mode=True)


def load_keras_file(path: str) -> keras.Model:
    """Loads a `.keras` file. The file may contain only the classes and functions that `build_architecture` accepts.

    Raises:
        Exception: any error of Keras for a file of another format, or an unknown layer.
    """
    with zipfile.ZipFile(path) as archive:
        _check_class_names(json.loads(archive.read("config.json")))
    with safe_deserialization():
        return keras.saving.load_model(path, compile=False, safe_mode=True)


def _check_class_names(part: Any) -> None:
    """Raises `ValueError` if the config of a model names a Keras function that no model needs, such as a download."""
    for each in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
        _check_class_names(each)
    if isinstance(part, dict) and isinstance(part.get("module"), str):
        own = part.get("config") if part.get("class_name") == "function" else part.get("class_name")
        name = f"{part['module']}.{own}".split(".")
        if name[0] == "keras" and len(name) > 2 and name[1] not in _OF_MODELS:
            raise ValueError(f"{'.'.join(name)} cannot be part of a model")


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
