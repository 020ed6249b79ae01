"""Lets models that preprocess raw data (KerasHub's tasks) do that before the data is split over the devices."""

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from kerasdp.data.sources import common_length
from kerasdp.errors import UserError
from kerasdp.reporting import report
from kerasdp.runtime.ranks import Processes
from kerasdp.training.data_checks import about_validation

# A tokenizer is faster with many texts at once; images must not be in memory twice.
_ROWS_AT_ONCE = 256


def has_preprocessing(model: keras.Model, method: str) -> bool:
    """Returns whether the model's `fit` (or another method) is one that calls its `preprocess_samples` on the data.

    So it is in `keras_hub.models.Task`, by its base class `PipelineModel`, of which other libraries have copies.
    """
    kind = next(kind for kind in type(model).__mro__ if method in vars(kind))
    return "preprocess_samples" in vars(kind)


def preprocessed(model: keras.Model, arguments: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """Preprocesses all data once, as the model would do for each batch.

    Args:
        model: has a `preprocess_samples(x, y, sample_weight)`.
        arguments: of `fit`, `evaluate` or `predict`; `x`, `y`, `sample_weight` and `validation_data` are read.
        processes: of the run; each of them must come to the same data.

    Returns:
        The arguments, with arrays.

    Raises:
        UserError: if the data is not in memory, has no samples or not equally many, or becomes samples of different
            shapes, or other data on each rank.
    """
    if getattr(model, "preprocessor", model) is None:
        return arguments
    arguments = dict(arguments)
    data = (arguments.pop(name, None) for name in ("x", "y", "sample_weight"))
    arguments |= _named(*_preprocess(model, *data))
    if arguments.get("validation_data") is not None:
        data = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
        with about_validation():
            found = _named(*_preprocess(model, *data))
        arguments["validation_data"] = tuple(found.values())
    digests = processes.all_gather_object(_digest([arguments.get(name) for name in ("x", "y", "validation_data")]))
    if len(set(digests)) > 1:
        raise UserError(
            f"{type(model).__name__}'s preprocessor gives other data on each process, since it draws random numbers: "
            "preprocess the data before, and set model.preprocessor = None"
        )
    return arguments


def _named(x: Any, y: Any, sample_weight: Any) -> dict[str, Any]:
    """Returns what there is, as arguments: `predict` takes no targets."""
    found = {"x": x, "y": y, "sample_weight": sample_weight}
    return {name: value for name, value in found.items() if value is not None}


def _preprocess(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    leaves = {"x": _leaves(x), "y": _leaves(y), "sample_weight": _leaves(sample_weight)}
    for leaf in itertools.chain(*leaves.values()):
        if not (isinstance(leaf, list) or (hasattr(leaf, "shape") and len(leaf.shape))):
            raise UserError(
                f"with {type(model).__name__}, which preprocesses its data: expected lists or arrays. Received: "
                f"{type(leaf).__name__}"
            )
    num_rows = common_length(leaves)
    parts = [_part(model, (x, y, sample_weight), first) for first in range(0, num_rows, _ROWS_AT_ONCE)]
    again = _part(model, (x, y, sample_weight), 0)
    if _digest(again) != _digest(parts[0]):
        report.warn(f"the preprocessor of {model.name} draws random numbers: once, not anew in each epoch")
    try:
        return keras.tree.map_structure(_concatenate, *parts)
    except ValueError as error:
        raise UserError(
            f"the preprocessor of {model.name} makes samples of different shapes ({error}): give it a fixed size, such "
            "as sequence_length"
        ) from None


def _part(model: Any, data: tuple[Any, Any, Any], first: int) -> tuple[Any, Any, Any]:
    rows = _map_leaves(data, lambda leaf: _as_plain(leaf[first : first + _ROWS_AT_ONCE]))
    found = keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(*rows))
    return keras.tree.map_structure(_as_array, found)


def _concatenate(*arrays: Any) -> Any:
    return None if arrays[0] is None else np.concatenate(arrays)


def _as_plain(leaf: Any) -> Any:
    """Returns a list of `str` for an array of them: what tokenizers take."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "USO":
        leaf = leaf.tolist()
    return [each.decode() if isinstance(each, bytes) else each for each in leaf] if isinstance(leaf, list) else leaf


def _as_array(leaf: Any) -> Any:
    # KerasHub gives tensors of TensorFlow with other backends, too.
    return leaf if leaf is None else np.asarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)


def _map_leaves(data: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to each leaf; a list is one, of texts say."""
    if isinstance(data, tuple):
        return tuple(_map_leaves(part, function) for part in data)
    if isinstance(data, dict):
        return {name: _map_leaves(part, function) for name, part in data.items()}
    return data if data is None else function(data)


def _leaves(data: Any) -> list[Any]:
    found: list[Any] = []
    _map_leaves(data, found.append)
    return found


def _digest(data: Any) -> str:
    digest = hashlib.sha256()
    for leaf in keras.tree.flatten(data):
        digest.update(b"" if leaf is None else np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()
