"""Describes a model in a checkpoint, so that it can be built again where the code that made it is not at hand."""

import json
import warnings
from typing import Any

import keras

from kerasdp.keras_compat import as_functional, without_tensorflow


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

    Raises:
        Exception: whatever Keras raises of a layer that it does not know.
    """
    return keras.saving.deserialize_keras_object(architecture)


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
