"""Lets a `keras.optimizers.LossScaleOptimizer` decide on the device whether a step of float16 counts."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from kerasdp.keras_compat.patches import replaced


@contextlib.contextmanager
def deciding_on_device(optimizer: Any) -> Iterator[None]:
    """Lets an optimizer that scales the loss update without a branch; for values in a `keras.StatelessScope`.

    Keras 3.15: `_common_apply` asks for the number whether the gradients are finite, on torch: that waits for the
    device, and cannot be captured in a graph. Here both outcomes are computed, and one is taken. Only where the
    methods `_common_apply`, `_stateful_handle_finite_grads` and `_stateful_handle_non_finite_grads` are Keras' own. No
    public way.
    """
    own = keras.optimizers.LossScaleOptimizer
    names = ("apply", "_common_apply", "_stateful_handle_finite_grads", "_stateful_handle_non_finite_grads")
    if not isinstance(optimizer, own) or any(
        getattr(type(optimizer), name) is not getattr(own, name) for name in names
    ):
        yield
        return

    def apply(gradients: list[Any], trainable_variables: list[Any] | None = None) -> None:
        weights = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        _apply(optimizer, gradients, weights)

    with replaced(optimizer, _common_apply=apply):
        yield


def _apply(optimizer: Any, gradients: list[Any], weights: list[Any]) -> None:
    """Does what `_common_apply` does.

    Keras 3.15: gradients of what `_overwrite_variable_with_gradient` tells are new values, not scaled.
    """
    is_finite, scale = optimizer.check_finite(gradients), optimizer.dynamic_scale
    unscaled = [
        gradient
        if gradient is None or optimizer._overwrite_variable_with_gradient(weight)
        else ops.divide(gradient, scale)
        for gradient, weight in zip(gradients, weights)
    ]
    held = list({id(one): one for one in (*optimizer.inner_optimizer.variables, *weights)}.values())
    # A scope knows nothing of the one around it (Keras 3.15).
    before = [(variable, variable.value) for variable in held]
    with keras.StatelessScope(before) as updated:
        optimizer.inner_optimizer.apply(unscaled, trainable_variables=weights)
    for variable, value in before:
        new = updated.get_current_value(variable)
        if new is not value:
            variable.assign(ops.where(is_finite, new, value))
    count = optimizer.step_counter
    is_time_to_grow = ops.equal(count, optimizer.dynamic_growth_steps - 1)
    grown = ops.where(is_time_to_grow, ops.multiply(scale, 2.0), scale)
    new_scale = ops.where(is_finite, grown, ops.multiply(scale, 0.5))
    starts_anew = ops.logical_or(ops.logical_not(is_finite), is_time_to_grow)
    new_count = ops.where(starts_anew, ops.zeros_like(count), ops.add(count, 1))
    optimizer.dynamic_scale.assign(new_scale)
    optimizer.step_counter.assign(ops.cast(new_count, count.dtype))
