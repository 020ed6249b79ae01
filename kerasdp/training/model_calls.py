"""Lets `model.fit`, `model.evaluate` and `model.predict` mean the runner's, and honours models that override them.

Models that preprocess raw data (KerasHub's tasks) do that before the data is split over the devices. Ranks see whether
they were given the same arguments.
"""

import contextlib
import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import keras
import numpy as np

from kerasdp.data.sources import common_length
from kerasdp.errors import UserError
from kerasdp.keras_compat.models import methods_through
from kerasdp.processes import watchdog
from kerasdp.processes.ranks import Processes, meet
from kerasdp.reporting import report
from kerasdp.training.data_checks import about_validation

Method = TypeVar("Method", bound=Callable[..., Any])


def through_model(method: Method) -> Method:
    """Makes a method of `Runner` call the model's own method of that name, if its class overrides that of Keras.

    Such a method hands changed arguments (more callbacks, say) to `super()`, which is the runner's again: see
    `model_calls_through`. One that preprocesses data (`kerasdp.training.model_calls`) is not called, but its
    preprocessing, on all data at once.
    """
    name, parameters, method = method.__name__, inspect.signature(method).parameters, _on_all_ranks(method)

    @functools.wraps(method)
    def call(runner: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        given = _arguments(method, runner, model, *args, **kwargs)
        if has_preprocessing(model, name):
            found = preprocess_all(model, given, runner.strategy.processes)
            # What a language model predicts is made of its inputs: `predict` has no use for it.
            return method(runner, model, **{name: value for name, value in found.items() if name in parameters})
        own = _own_method(model, name)
        if own is None:
            return method(runner, model, **given)
        num_model_calls = runner.num_model_calls
        try:
            result = own(model, **given)
        except NotImplementedError as error:  # what KerasHub's tasks for inference say
            raise UserError(f"{type(model).__name__}.{name}: {error}") from error
        if runner.num_model_calls == num_model_calls:
            raise UserError(f"{type(model).__name__} has a {name} of its own, which does not call super().{name}")
        return result

    return cast(Method, call)


def _on_all_ranks(method: Method) -> Method:
    """Makes a method of `Runner` begin when all ranks have called it, with the same arguments."""

    @functools.wraps(method)
    def call(runner: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        given = {}
        if runner.strategy.processes.num_processes > 1:
            given = summarize_arguments(model, _arguments(method, runner, model, *args, **kwargs))
        with watchdog.current.watching():
            meet(runner.strategy.processes, method.__name__, given)
            return method(runner, model, *args, **kwargs)

    return cast(Method, call)


def _arguments(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns what a method of `Runner` is given after runner and model, by name."""
    return dict(itertools.islice(inspect.signature(method).bind(*args, **kwargs).arguments.items(), 2, None))


def _own_method(model: keras.Model, name: str) -> Callable[..., Any] | None:
    """Returns a method of a class that extends Keras' model; None if the model has Keras' own."""
    kind = next(kind for kind in type(model).__mro__ if name in vars(kind))
    return None if issubclass(keras.Model, kind) else vars(kind)[name]


def model_calls_through(runner: Any) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which the methods of all models mean those of a runner.

    They would train on one device, or on each one by itself, with random numbers of the backend's, and nobody would
    notice. While the runner trains, those that a callback calls are Keras' own, but for `evaluate`.
    """
    names = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    return methods_through({name: functools.partial(_through_runner, runner, name) for name in names})


def _through_runner(
    runner: Any, name: str, method: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Is called in the place of a method of all models while a runner is there."""
    if runner.model_steps.num_running and name != "evaluate":
        return method(model, *args, **kwargs)
    if name in ("train_on_batch", "test_on_batch"):
        raise UserError(f"expected runner.fit or runner.evaluate. Received: model.{name}, which uses one device")
    if hasattr(model, "preprocess_samples"):
        raise UserError(
            f"expected runner.{name}(model, ...). Received: model.{name} of a {type(model).__name__}, which cuts and "
            "preprocesses the data by itself"
        )
    if name == "predict_on_batch":
        (x,) = inspect.signature(method).bind(model, *args, **kwargs).args[1:]
        return vars(type(runner))["predict"](runner, model, x, batch_size=len(keras.tree.flatten(x)[0]))
    runner.num_model_calls += 1
    # Not the one of `through_model`: this may be the `super()` of a model's own method.
    return getattr(type(runner), name).__wrapped__(runner, model, *args, **kwargs)


# Rows of each array, and values of each row, that are compared.
_MOST = 64
# What may differ: what is shown, and callbacks, some of which are for one rank.
_OWN = ("verbose", "callbacks")


def summarize_arguments(model: keras.Model, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the arguments of a call of `fit`, `evaluate` or `predict`, as `kerasdp.processes.ranks.unlike` has them.

    Args:
        model: whose weights are counted.
        arguments: by their names.
    """
    found = {name: described(value) for name, value in arguments.items() if name not in _OWN and value is not None}
    return {"model": {"shown": _of_model(model)} | _sample_of_weights(model), **found}


def _of_model(model: keras.Model) -> str:
    if not model.built:
        return f"a {type(model).__name__} that is not built"
    count = sum(math.prod(weight.shape) for weight in model.weights)
    return f"a {type(model).__name__} of {count} numbers, {len(model.trainable_weights)} weights trained"


def _sample_of_weights(model: keras.Model) -> dict[str, float]:
    """Returns a sample of the weights, as `described` does of data; nothing if they cannot be read here as a whole."""
    weights = model.trainable_weights[:_MOST] if model.built else []
    if not weights or any(not getattr(weight.value, "is_fully_replicated", True) for weight in weights):  # jax
        return {}
    samples = [_sample(keras.ops.convert_to_numpy(weight.value)) for weight in weights]
    return {"sample": sum(samples) / len(samples)}


def described(value: Any) -> dict[str, Any]:
    """Returns an argument of a call, or data, as `kerasdp.processes.ranks.unlike` has it."""
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


# A tokenizer is faster with many texts at once; images must not be in memory twice.
_ROWS_AT_ONCE = 256


def has_preprocessing(model: keras.Model, method: str) -> bool:
    """Returns whether the model's `fit` (or another method) is one that calls its `preprocess_samples` on the data.

    So it is in `keras_hub.models.Task`, by its base class `PipelineModel`, of which other libraries have copies.
    """
    kind = next(kind for kind in type(model).__mro__ if method in vars(kind))
    return "preprocess_samples" in vars(kind)


def preprocess_all(model: keras.Model, arguments: dict[str, Any], processes: Processes) -> dict[str, Any]:
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
        report.warn(f"the preprocessor of {model.name} draws random numbers: once, not in each epoch")
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
