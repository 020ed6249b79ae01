"""Lets `model.fit`, `model.evaluate` and `model.predict` mean the runner's, and honours models that override them.

Ranks see whether they were given the same arguments.
"""

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import keras
import numpy as np

from kerasdp.errors import UserError
from kerasdp.keras_compat.models import methods_through
from kerasdp.processes import watchdog
from kerasdp.processes.ranks import meet

Method = TypeVar("Method", bound=Callable[..., Any])


def through_model(method: Method) -> Method:
    """Makes a method of `Runner` call the model's own method of that name, if its class overrides that of Keras.

    Such a method hands changed arguments (more callbacks, say) to `super()`, which is the runner's again: see
    `model_calls_through`. One that would only preprocess data, and has no preprocessor, is not called.
    """
    name = method.__name__

    @functools.wraps(method)
    def on_all_ranks(runner: Any, model: keras.Model, **given: Any) -> Any:
        # Begins when all ranks have called it, with the same arguments.
        processes = runner.strategy.processes
        with watchdog.current.watching():
            meet(processes, name, summarize_arguments(model, given) if processes.num_processes > 1 else {})
            return method(runner, model, **given)

    @functools.wraps(on_all_ranks)
    def call(runner: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        given = _arguments(method, runner, model, *args, **kwargs)
        kind = next(kind for kind in type(model).__mro__ if name in vars(kind))  # whose method it is
        if issubclass(keras.Model, kind) or _would_preprocess(model, kind):
            return on_all_ranks(runner, model, **given)
        num_model_calls = runner._num_model_calls
        result = vars(kind)[name](model, **given)
        if runner._num_model_calls == num_model_calls:
            raise UserError(f"{type(model).__name__} has a {name} of its own, which does not call super().{name}")
        return result

    return cast(Method, call)


def _arguments(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns what a method of `Runner` is given after runner and model, by name."""
    return dict(itertools.islice(inspect.signature(method).bind(*args, **kwargs).arguments.items(), 2, None))


def _would_preprocess(model: keras.Model, kind: type) -> bool:
    """Returns whether the `fit` of a class would preprocess data, but there is no preprocessor.

    So it is in `keras_hub.models.Task`, by its base class `PipelineModel`, of which other libraries have copies.

    Raises:
        UserError: if there is one, which every process would call for data that is split already.
    """
    if "preprocess_samples" not in vars(kind):
        return False
    if getattr(model, "preprocessor", model) is not None:
        raise UserError(
            f"{type(model).__name__} preprocesses its data: do that before, by x, y, sample_weight = keras.utils."
            "unpack_x_y_sample_weight(model.preprocess_samples(x, y)), and set model.preprocessor = None"
        )
    return True


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
    if runner._model_steps.num_running and name != "evaluate":
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
    runner._num_model_calls += 1
    # Not the one of `through_model`: this may be the `super()` of a model's own method.
    own = getattr(type(runner), name).__wrapped__
    return own(runner, model, **_arguments(own, runner, model, *args, **kwargs))


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
    weights = [weight.value for weight in model.trainable_weights[:_MOST]]
    # On jax some may be held by other processes.
    whole = [keras.ops.convert_to_numpy(value) for value in weights if getattr(value, "is_fully_replicated", True)]
    count = sum(math.prod(weight.shape) for weight in model.weights)
    shown = f"a {type(model).__name__} of {count} numbers, {len(model.trainable_weights)} weights trained"
    found = {name: described(value) for name, value in arguments.items() if name not in _OWN and value is not None}
    return {"model": described(whole) | {"shown": shown}, **found}


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
