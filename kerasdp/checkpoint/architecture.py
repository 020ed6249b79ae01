"""Describes a model in a checkpoint, so that it can be built again where the code that made it is not at hand."""

import json
import warnings
import zipfile
from typing import Any

import keras

from kerasdp.keras_compat.models import as_functional
from kerasdp.keras_compat.saving import safe_deserialization
from kerasdp.keras_compat.settings import without_tensorflow

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
    _check_names(architecture)
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
        _check_names(json.loads(archive.read("config.json")))
    with safe_deserialization():
        return keras.saving.load_model(path, compile=False, safe_mode=True)


def _check_names(part: Any) -> None:
    """Raises `ValueError` if a description of a model names a function of Keras that is no part of models."""
    for each in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
        _check_names(each)
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
