"""Redirects `model.fit`, `model.evaluate` and `model.predict` to the runner, also for models that override them.

Also checks that all ranks pass the same arguments to these methods.
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
    """Decorates a method of `Runner`, such as `fit`. If a model overrides `fit`, the runner calls the model's `fit`.

    The model's `fit` may change arguments, for example add callbacks, and then calls `super().fit`. This call runs the
    `fit` of the runner; see `model_calls_through`. If the model's `fit` only preprocesses data, and the model has no
    preprocessor, the runner does not call the model's `fit`.
    """
    name = method.__name__

    @functools.wraps(method)
    def on_all_ranks(runner: Any, model: keras.Model, **given: Any) -> Any:
        # Waits until all ranks have made the same call with the same arguments.
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
            raise UserError(f"{type(model).__name__} overrides {name} without a call of super().{name}; add this call")
        return result

    return cast(Method, call)


def _arguments(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call to a `Runner` method by name, except the runner and the model."""
    return dict(itertools.islice(inspect.signature(method).bind(*args, **kwargs).arguments.items(), 2, None))


def _would_preprocess(model: keras.Model, kind: type) -> bool:
    """Returns whether a class's `fit` only preprocesses data, but the model has no preprocessor.

    `keras_hub.models.Task` inherits a `fit` of this kind from `PipelineModel`. Other libraries copy that class.

    Raises:
        UserError: if the model has a preprocessor. Each process would apply it to data that is already split.
    """
    if "preprocess_samples" not in vars(kind):
        return False
    if getattr(model, "preprocessor", model) is not None:
        raise UserError(
            f"{type(model).__name__} preprocesses its data in fit; preprocess before fit: x, y, sample_weight = keras."
            "utils.unpack_x_y_sample_weight(model.preprocess_samples(x, y)), then set model.preprocessor = None"
        )
    return True


def model_calls_through(runner: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which methods of all models, such as `model.fit`, call the methods of the runner.

    Without this context, a model would silently train on only one device, or on each device separately, with the
    backend's random values. While the runner trains, the methods that callbacks call are not redirected, except
    `evaluate`.
    """
    names = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
    return methods_through({name: functools.partial(_through_runner, runner, name) for name in names})


def _through_runner(
    runner: Any, name: str, method: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Replaces a method of all models, such as `fit`, while a runner is active. Calls the method of the runner."""
    if runner._model_steps.num_running and name != "evaluate":
        return method(model, *args, **kwargs)
    if name in ("train_on_batch", "test_on_batch"):
        raise UserError(f"model.{name} would use only one device; use runner.fit or runner.evaluate")
    if hasattr(model, "preprocess_samples"):
        raise UserError(
            f"expected runner.{name}(model, ...). Received: model.{name} of a {type(model).__name__}, which would "
            f"batch and preprocess the data again; call runner.{name}"
        )
    if name == "predict_on_batch":
        (x,) = inspect.signature(method).bind(model, *args, **kwargs).args[1:]
        return vars(type(runner))["predict"](runner, model, x, batch_size=len(keras.tree.flatten(x)[0]))
    runner._num_model_calls += 1
    # The undecorated method: this call may come from `super()` in the model's own method.
    own = getattr(type(runner), name).__wrapped__
    return own(runner, model, **_arguments(own, runner, model, *args, **kwargs))


# Rows of each array, and values of each row, that are compared.
_MOST = 64
# Arguments that may differ between ranks: some callbacks run on one rank only.
_OWN = ("verbose", "callbacks")


def summarize_arguments(model: keras.Model, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Summarizes the arguments of `fit`, `evaluate` or `predict`, to compare them between ranks.

    `kerasdp.processes.ranks.unlike` compares the summaries.

    Args:
        model: the model; the summary contains the number of its weights.
        arguments: arguments by name.
    """
    weights = [weight.value for weight in model.trainable_weights[:_MOST]]
    # With JAX other processes may hold some of them.
    whole = [keras.ops.convert_to_numpy(value) for value in weights if getattr(value, "is_fully_replicated", True)]
    count = sum(math.prod(weight.shape) for weight in model.weights)
    shown = f"a {type(model).__name__} of {count} parameters, {len(model.trainable_weights)} trainable weights"
    found = {name: described(value) for name, value in arguments.items() if name not in _OWN and value is not None}
    return {"model": described(whole) | {"shown": shown}, **found}


def described(value: Any) -> dict[str, Any]:
    """Describes an argument or data by a text and a checksum, for `kerasdp.processes.ranks.unlike`."""
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
    """Returns a checksum of an array between -1 and 1.

    Arrays with different values have different checksums. Rounding differences change the checksum only slightly.
    """
    if array.dtype.kind not in "biuf" or array.size == 0:
        return 0.0
    rows = array[:: -(-len(array) // _MOST)] if array.ndim else array.reshape(1, 1)
    rows = rows.reshape(len(rows), -1)
    numbers = np.nan_to_num(rows[:, :: -(-rows.shape[1] // _MOST)].astype("float64").ravel())
    total = np.abs(numbers).sum()
    return float(numbers @ np.cos(np.arange(len(numbers))) / total) if 0 < total < math.inf else 0.0
