"""Gathers and restores what a checkpoint holds, in NumPy and JSON: the same on every backend and device count.

That is the variables, the identity of the run, the callbacks' attributes, and the layers of the model.

A callback's attributes in JSON: `{"array": key}` stands for an array, `{"weights": [...]}` for arrays like the weights
of the model, and `{"kind": class, "items": [...]}` for a container other than a list. A user's dictionary has the last
form, whatever it contains.
"""

import collections
import hashlib
import json
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable
from typing import Any

import keras
import numpy as np

from kerasdp.checkpoint.names import GROUPS, arguments_of, comparable, in_words, is_unsure, named, names_in
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.keras_compat.layers import frozen_weights, is_of_keras
from kerasdp.keras_compat.models import as_functional
from kerasdp.keras_compat.optimizers import inner_optimizer, learning_rate_schedule
from kerasdp.keras_compat.saving import safe_deserialization
from kerasdp.keras_compat.settings import without_tensorflow
from kerasdp.same.portable import batch_norms

# `kerasdp.step.contract.Strategy.read`.
Read = Callable[[keras.Model, list[Any], Callable[[Any], Any] | None], list[Any]]
# Of what is in the identity of a run; those that are digests.
FROZEN = "the frozen weights"
_DIGESTS = ("model", "first batch of the data", "the weights that train", FROZEN)
# What two runs must have in common for one to resume the other.
_FLAGS = ("dataset", "seed", "batch_norm", "optimizer", "learning_rate")


def variables_of(model: keras.Model, groups: Iterable[str] = GROUPS) -> dict[str, Any]:
    """Returns all variables: of the model (seeds of random layers among them), the optimizer and the metrics.

    They are named as in `kerasdp.checkpoint.names`.
    """
    return {name: variable for group in groups for name, variable in named(model, group)}


def gather(model: keras.Model, groups: Iterable[str] = GROUPS) -> dict[str, np.ndarray]:
    """Returns copies of the values of `variables_of`."""
    return {name: to_numpy(variable) for name, variable in variables_of(model, groups).items()}


def frozen(model: keras.Model) -> dict[str, Any]:
    """Returns the weights of a model that were made to train, and do not, by name."""
    known = {id(variable) for variable in frozen_weights(model)}
    return {name: variable for name, variable in named(model, "model") if id(variable) in known}


def digest_of_frozen(model: keras.Model, read: Read | None = None) -> str:
    """Returns a digest of the names and values of the weights of `frozen`; `read`: where they are held in parts."""
    of_names = dict(sorted(frozen(model).items()))

    def digest(value: Any) -> str:
        return _digest([to_numpy(value)])

    variables = list(of_names.values())
    digests = read(model, variables, digest) if read else map(digest, variables)
    return _digest(map(_as_bytes, (*of_names, *digests)))


def restore(
    model: keras.Model, arrays: dict[str, np.ndarray], groups: Iterable[str], without: Collection[str] = frozenset()
) -> None:
    """Gives variables the values that `gather` took, in whatever precision they have now.

    Args:
        model: built and, for the groups other than `"model"`, compiled.
        arrays: as `gather` gave them.
        groups: of `GROUPS`; `"loss_scale"` is skipped where there is none.
        without: as in `gather`.

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
        if odd is not None and group == "metrics" and (odd in known) != (odd in own):
            raise UserError(
                f"--resume: the checkpoint was written within an epoch, whose metrics were others: {odd} is only "
                f"{'in the checkpoint' if odd in known else 'in this run'}; resume with the metrics of then"
            )
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
            kind = keras.backend.standardize_dtype(variable.dtype)
            # NumPy alone has no bfloat16: Keras makes it of float32.
            variable.assign(known[name].astype("float32" if kind == "bfloat16" else kind))


def to_numpy(variable: Any) -> np.ndarray:
    """Returns a copy of the value of a variable, or a tensor; of bfloat16 in float32."""
    array = np.array(keras.ops.convert_to_numpy(variable))  # a copy: the next step writes over what it came from
    return array if array.dtype.kind in "fiub" else array.astype("float32")  # bfloat16 is a type of its own


def identity(
    config: Config, model: keras.Model, reader: Any, micro_batch_rows: int | None = None, read: Read | None = None
) -> dict[str, Any]:
    """Returns what must be the same for a run to resume: choices, model, optimizer, data, in words or as digests.

    Args:
        config: the run's choices.
        model: built and compiled.
        reader: of the training data, as in `kerasdp.data.batch`.
        micro_batch_rows: that a layer sees, if neither the global batch nor a replica's part of it.
        read: where weights are held in parts.
    """
    batch = reader.first()
    # Rank 0 computes it: it holds the first row whatever the number of processes.
    first_row = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:1], batch.inputs)
    data = keras.tree.flatten((batch.indices, first_row, *reader.sample(len(batch.indices))[1:]))
    found = {f"--{name}": getattr(config, name) for name in _FLAGS}
    found |= {"global batch": len(batch.indices), "batches an epoch": reader.num_batches}
    found["first batch of the data"] = _digest(leaf for leaf in data if leaf is not None)
    with without_tensorflow():
        found |= {"model": _architecture(model), "loss": in_words(model.loss)}
        found["optimizer"], found["learning rate"] = _optimizer_in_words(model.optimizer)
        for where, other in names_in(model).optimizers:
            found[f"{where} of the model"] = list(_optimizer_in_words(other))
    if micro_batch_rows is not None and batch_norms(model):
        found["rows that a batch norm sees"] = micro_batch_rows
    if held := frozen(model):
        names = sorted(name for name, variable in named(model, "model") if variable.trainable and name not in held)
        found["the weights that train"] = _digest(map(_as_bytes, names))
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
    name = next((name for name in dict.fromkeys((*saved, *own)) if saved.get(name) != own.get(name)), None)
    if name is None:
        return
    expected, received = saved.get(name), own.get(name)
    if name == "--learning_rate" and None in (expected, received):  # the optimizer's
        expected, received = (_rate_in_words(each.get("learning rate")) for each in (saved, own))
    kind = "the digest " if name in _DIGESTS else ""
    found = f": expected {kind}{expected!s:.300}. Received: {received!s:.300}"
    if name == FROZEN:
        raise UserError(
            "--resume: the frozen weights, which no checkpoint of this run holds, are not those that it began "
            f"with{found}; begin with the same file, preset or seed"
        )
    raise UserError(
        f"--resume: this run differs from the one in the workdir in {name}{found}; backend, devices and precision may "
        "change, this may not; a new run can begin with its weights, which recipes/export.py writes"
    )


def _rate_in_words(rate: Any) -> str:
    return f"{rate:.6g}" if isinstance(rate, float) else str(rate)  # a schedule is an object


def _architecture(model: keras.Model) -> str:
    """Returns a digest of layers and their arguments, without what depends on precision, process and backend."""
    parts = []
    for name, layer in sorted(names_in(model).layers, key=lambda pair: pair[0]):
        arguments = {} if isinstance(layer, keras.Model) else arguments_of(layer)
        parts.append([*([name] if name else []), type(layer).__name__, comparable(arguments)])
    return _digest([_as_bytes(json.dumps(parts, sort_keys=True))])


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), "uint8")


def _digest(arrays: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        array = np.asarray(array)
        # Data may come in the precision of the run.
        array = np.ascontiguousarray(array.astype("float32") if array.dtype.kind == "f" else array)
        digest.update(f"{array.shape}".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()[:16]


# Attributes of Keras' `Callback`, or set by each `fit`.
_NOT_STATE = ("_model", "params", "validation_data")
_PLAIN = (bool, int, float, str, type(None))
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, dict, set, frozenset)}
_HOLDING = (list, tuple, dict, set, frozenset, collections.deque)
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
        The attributes that keep their own value, since a file may not set them, or what it holds cannot be read.
    """
    left = []
    for key, callback in zip(_callback_keys(callbacks), callbacks):
        for name, value in states.get(key, {}).items():
            try:
                if not _may_be_restored(callback, name, value):
                    raise LookupError
                setattr(callback, name, _decode(value, arrays, model))
            except (LookupError, TypeError, ValueError, RecursionError):  # the file may hold anything
                left.append(f"{type(callback).__name__}.{ascii(name)[1:-1]:.80}")
    return left


def _may_be_restored(callback: keras.callbacks.Callback, name: str, value: Any) -> bool:
    """Returns whether a file may say an attribute: data, but no function, and no text of Keras' own callbacks.

    Keras' own are places to write to, which only the user who made the callback may choose.
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
    if is_of_keras(type(callback)):  # Keras' own callbacks make their files and functions again
        return {}
    saved = plain_attributes(callback)
    return {name: _described(value) for name, value in _attributes(callback).items() if name not in saved}


def _attributes(callback: keras.callbacks.Callback) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items() if name not in _NOT_STATE}


def _described(value: Any, depth: int = _DEPTH) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth and isinstance(value, _HOLDING):
        parts: Any = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
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
    kind = type(value).__name__
    if _COLLECTIONS.get(kind) is not type(value):
        raise TypeError
    order = None if model is None else _canonical_order(model, value)
    if order is not None and isinstance(value, list):
        return {"weights": _encode([value[place] for place in order], key, arrays)}
    items = [
        _encode(part, f"{key}/{place}", arrays, model)
        for place, part in enumerate(map(list, value.items()) if isinstance(value, dict) else value)
    ]
    return items if type(value) is list else {"kind": kind, "items": items}


def _decode(value: Any, arrays: dict[str, np.ndarray], model: keras.Model) -> Any:
    """Returns what `_encode` was given.

    Raises:
        LookupError, TypeError, ValueError: if `_encode` writes no such thing.
    """
    if not isinstance(value, (list, dict)):
        return value
    if isinstance(value, dict) and value.keys() == {"array"} and value["array"] in arrays:
        return arrays[value["array"]]
    if isinstance(value, dict) and value.keys() == {"weights"} and len(value["weights"]) == len(model.weights):
        order = _order_of_names(model)
        return [_decode(value["weights"][order.index(place)], arrays, model) for place in range(len(order))]
    kind, items = ("list", value) if isinstance(value, list) else (value["kind"], value["items"])
    return _COLLECTIONS[kind](_decode(item, arrays, model) for item in items)


# What models are made of, among Keras' public modules. Its others read, write and connect when they are called.
_OF_MODELS = {
    "activations", "constraints", "dtype_policies", "initializers", "layers", "losses", "metrics", "models", "ops",
    "optimizers", "quantizers", "random", "regularizers", "src",
}  # fmt: skip
_MOST_BYTES = 100_000_000  # of a description, as safetensors has it of a header


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
        size = archive.getinfo("config.json").file_size
        if size > _MOST_BYTES:
            raise ValueError(f"its config.json has {size} bytes")
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
