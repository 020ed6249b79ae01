"""Reaches callbacks, and losses under `tf.distribute`."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.losses import loss as loss_module

from kerasdp.keras_compat.patches import wrap_for_good

# By what the losses of single outputs are multiplied for their means; None outside of `losses_of_whole_batch`.
_factor: contextvars.ContextVar[float | None] = contextvars.ContextVar("kerasdp_factor", default=None)


def set_monitor_direction(callback: keras.callbacks.Callback) -> None:
    """Lets a callback that watches a metric decide now whether less is better, if it has not yet.

    Keras 3.15: `_set_monitor_op` of EarlyStopping and its like turns the sign of `min_delta` at the end of their first
    epoch: a second time, if the turned one was restored before. No public way.
    """
    if getattr(callback, "monitor_op", callback) is None:
        callback._set_monitor_op()


@contextlib.contextmanager
def losses_of_whole_batch(factor: float = 1.0) -> Iterator[None]:
    """Keeps Keras' losses from being divided by the number of replicas of a `tf.distribute` strategy.

    Keras 3.15: `scale_loss_for_distribution` and `unscale_loss_for_distribution` divide those that take a mean, not
    those that take a sum or are user-defined, so that no later factor could be right for all. They are wrapped once,
    for good; the wrapper asks a context variable, since TensorFlow traces replicas in threads, in turns. No public way.

    `factor`: by which the losses of single outputs are multiplied for the means that Keras keeps of them.
    """
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        wrap_for_good(loss_module, name, functools.partial(_unless_whole_batch, name.startswith("unscale")))
    token = _factor.set(factor)
    try:
        yield
    finally:
        _factor.reset(token)


def _unless_whole_batch(is_for_means: bool, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def scale(value: Any) -> Any:
        factor = _factor.get()
        if factor is None:
            return original(value)
        return value * factor if is_for_means and factor != 1.0 else value

    return scale
