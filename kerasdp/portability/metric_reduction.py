"""Tells which metrics add up over the rows of a batch, so that each replica may update them with its own rows."""

import inspect
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from kerasdp.keras_compat.layers import is_of_keras
from kerasdp.keras_compat.models import compiled_metrics
from kerasdp.keras_compat.own_rows import (
    compiled_variables,
    is_metric_of_keras,
    metric_function,
    update_compiled_metrics,
)
from kerasdp.portability.loss_reduction import BY_ROWS, coupling_losses, is_declared

# What was found out about others, by the metric: whether their variables are sums over the rows.
found: "weakref.WeakKeyDictionary[keras.metrics.Metric, bool]" = weakref.WeakKeyDictionary()


def adds_up(metric: keras.metrics.Metric) -> bool:
    """Returns whether updates with some rows of a batch, and with the others, change the variables as one with all."""
    function, options = metric_function(metric)
    if is_declared(function, type(metric)):
        return True
    if is_of_keras(type(metric)) and function is None:
        return bool(metric.variables)
    is_known = function in BY_ROWS or (inspect.isfunction(function) and is_metric_of_keras(function))
    if is_of_keras(type(metric)) and is_known:
        return options.get("axis", -1) == -1
    return found.get(metric, False)


def are_sums_over_rows(model: keras.Model) -> bool:
    """Returns whether the metrics of a compiled model, once they are built, add up over the rows of a batch."""
    return type(model).compute_metrics is keras.Model.compute_metrics and not coupling_metrics(model)


def coupling_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics of a compiled model that are not known to add up."""
    return [metric for _, metric in compiled_metrics(model) if not adds_up(metric)]


def try_metrics(model: keras.Model, targets: Any, outputs: Any, sample_weight: Any) -> None:
    """Tries the metrics of a compiled model that are not known, and keeps what it finds for `adds_up`.

    They are updated with all of these rows, with some, and with the others. What fails does not add up.

    Args:
        model: its metrics built.
        targets: arrays with as many rows as `outputs`.
        outputs: as the model gives them.
        sample_weight: likewise, or None.
    """
    unknown = coupling_metrics(model)
    if not unknown:
        return
    with ThreadPoolExecutor(1) as thread:  # where no graph is being traced, and no scope is entered
        sums = thread.submit(_try, model, (targets, outputs, sample_weight)).result()
    for metric in unknown:
        found[metric] = bool(metric.variables) and all(sums.get(id(variable), False) for variable in metric.variables)


def _try(model: keras.Model, data: Any) -> dict[int, bool]:
    """Returns, by the `id` of each variable, whether what it gets is a sum over the rows."""
    num_rows = len(keras.tree.flatten(data)[0])
    cut = num_rows // 2 - 1  # uneven
    variables = compiled_variables(model)[1]
    start = [np.zeros(variable.shape) for variable in variables]

    def after(values: list[Any], rows: slice) -> list[Any]:
        own = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], data)
        begun = [
            (variable, keras.ops.convert_to_tensor(value, variable.dtype)) for variable, value in zip(variables, values)
        ]
        with keras.StatelessScope(begun) as scope:
            update_compiled_metrics(model, *own)
        return [keras.ops.convert_to_numpy(scope.get_current_value(variable)) for variable in variables]

    try:
        whole, first = after(start, slice(0, num_rows)), after(start, slice(0, cut))
        second, in_turn = after(start, slice(cut, num_rows)), after(first, slice(cut, num_rows))
    except Exception:  # user-defined, on outputs that it may not expect
        return {}
    return {
        id(variable): bool(np.isfinite(parts).all() and _equal(parts[0], parts[1] + parts[2]) and _equal(*parts[::3]))
        for variable, *parts in zip(variables, whole, first, second, in_turn)
    }


def _equal(received: Any, expected: Any) -> bool:
    largest = max(np.abs(expected).max(initial=0.0), 1.0)  # AUC's are differences of such numbers
    return bool(np.allclose(received, expected, rtol=0.0, atol=1e-5 * largest))


def reasons_to_gather(model: keras.Model, *, is_weighted: bool) -> list[str]:
    """Returns what of a compiled model needs the outputs of the whole batch, with the reason; nothing, it may be.

    `is_weighted`: whether the samples have weights.
    """
    reasons = [
        f"the loss {loss.name} ({reduction.value})"
        for loss, reduction in coupling_losses(model, is_weighted=is_weighted)
    ]
    for name in ("compute_loss", "compute_metrics"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            reasons = [*(reasons if name == "compute_metrics" else ()), f"{name} of {type(model).__name__}"]
    return reasons + [f"the metric {metric.name} (not known to add up)" for metric in coupling_metrics(model)]
