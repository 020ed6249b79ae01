"""Describes the arguments of a call, so that ranks can see whether they were given the same."""

import math
from typing import Any

import keras
import numpy as np

# Of each array so many rows, and of each row so many numbers, are looked at.
_MOST = 64
# What may differ: what is shown, and callbacks, some of which are for one rank.
_OWN = ("verbose", "callbacks")


def described(model: keras.Model, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the arguments of a call of `fit`, `evaluate` or `predict`, as `heartbeat.unlike` has them.

    Args:
        model: whose weights are counted.
        arguments: by their names.
    """
    found = {name: _described(value) for name, value in arguments.items() if name not in _OWN and value is not None}
    return {"model": {"shown": _of_model(model)} | _sample_of_weights(model), **found}


def _of_model(model: keras.Model) -> str:
    if not model.built:
        return f"a {type(model).__name__} that is not built"
    count = sum(math.prod(weight.shape) for weight in model.weights)
    return f"a {type(model).__name__} of {count} numbers, {len(model.trainable_weights)} weights trained"


def _sample_of_weights(model: keras.Model) -> dict[str, float]:
    """Returns a sample of the weights, as `_described` does of data; nothing if they cannot be read here as a whole."""
    weights = model.trainable_weights[:_MOST] if model.built else []
    if not weights or any(not getattr(weight.value, "is_fully_replicated", True) for weight in weights):  # jax
        return {}
    samples = [_sample(keras.ops.convert_to_numpy(weight.value)) for weight in weights]
    return {"sample": sum(samples) / len(samples)}


def _described(value: Any) -> dict[str, Any]:
    leaves = keras.tree.flatten(value) if isinstance(value, (list, tuple, dict)) else [value]
    if len(leaves) > _MOST:
        return {"shown": f"{type(value).__name__} of {len(leaves)}"}
    found = {"shown": ", ".join(map(_shown, leaves))}
    samples = [_sample(leaf) for leaf in leaves if isinstance(leaf, np.ndarray)]
    return {**found, "sample": sum(samples) / len(samples)} if samples else found


def _shown(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    count, name = getattr(value, "num_samples", None), type(value).__name__
    if isinstance(value, keras.utils.PyDataset):
        return f"{name} of {value.num_batches} batches"
    return name if count is None else f"{name} of {count} samples"


def _sample(array: np.ndarray) -> float:
    """Returns a number from -1 to 1 that is another for other values, and for round-off nearly the same."""
    if array.dtype.kind not in "biuf" or array.size == 0:
        return 0.0
    rows = array[:: -(-len(array) // _MOST)] if array.ndim else array.reshape(1, 1)
    rows = rows.reshape(len(rows), -1)
    numbers = np.nan_to_num(rows[:, :: -(-rows.shape[1] // _MOST)].astype("float64").ravel())
    total = np.abs(numbers).sum()
    return float(numbers @ np.cos(np.arange(len(numbers))) / total) if 0 < total < math.inf else 0.0
