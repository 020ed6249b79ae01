"""Finds step methods of a user's model, and lets a run take part in what they do with optimizers and metrics."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from kerasdp.keras_compat.layers import all_layers
from kerasdp.keras_compat.optimizers import wrapped_apply
from kerasdp.keras_compat.patches import replaced_in_each, wrapped

STEPS = ("train_step", "test_step", "predict_step")


def own_steps(model: keras.Model) -> set[str]:
    """Returns which of train_step, test_step and predict_step the model's class overrides."""
    return {name for name in STEPS if getattr(type(model), name) is not getattr(keras.Model, name)}


def as_keras_gives(data: Any) -> Any:
    """Returns inputs, targets and sample weights as Keras hands them to a step: without what there is not."""
    return keras.utils.pack_x_y_sample_weight(*data)


def has_call(model: keras.Model) -> bool:
    """Returns whether a model can be called: one that has a `train_step` of its own may do without."""
    return type(model).call is not keras.Model.call


class _LossesOfThread(list[Any]):
    """A layer's list of losses, one for each thread: TensorFlow traces replicas in threads, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread: dict[int, list[Any]] = {}

    def extend(self, losses: Iterable[Any]) -> None:
        self._own().extend(losses)

    def clear(self) -> None:
        self._own().clear()

    def __getitem__(self, place: Any) -> Any:
        return self._own()[place]

    def _own(self) -> list[Any]:
        return self._of_thread.setdefault(threading.get_ident(), [])


def losses_by_thread(layers: Iterable[keras.layers.Layer]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which losses that layers add are kept by the thread that adds them.

    Keras 3.15: they are in `Layer._losses`, of which are used `extend`, `clear` and a slice. No public way.
    """
    return replaced_in_each((layer, {"_losses": _LossesOfThread()}) for layer in layers)


@contextlib.contextmanager
def hooked_steps(
    model: keras.Model,
    apply: Callable[[Callable[..., Any]], Callable[..., Any]],
    update_mean: Callable[[Callable[..., Any]], Callable[..., Any]],
    result: Callable[[keras.metrics.Metric, Callable[[], Any]], Callable[[], Any]],
) -> Iterator[None]:
    """Exchanges what a user-defined step calls, until it is left.

    Keras 3.15: user-defined steps call `Optimizer.apply` and metrics where they please; no hook of its own.

    Args:
        model: with the steps. `result` of its metrics is exchanged, and its layers' losses are kept by thread.
        apply: gets `apply` of all optimizers, and gives the method in its place.
        update_mean: gets `keras.metrics.Mean.update_state`, and gives the method in its place.
        result: gets a metric and its `result`, and gives the function in its place.
    """
    with (
        wrapped_apply(apply),
        wrapped(keras.metrics.Mean, update_state=update_mean),
        losses_by_thread(all_layers(model)),
        replaced_in_each((metric, {"result": result(metric, metric.result)}) for metric in model.metrics),
    ):
        yield


@contextlib.contextmanager
def plain_attributes_kept(model: keras.Model) -> Iterator[None]:
    """Gives a model its numbers, texts and truth values back that a step changes, past Keras, which would track them.

    For a trial of a user-defined step, which may count its calls in an attribute; those of the class count on. Keras
    3.15 copies no model together with its state.
    """

    def plain() -> dict[str, Any]:
        return {key: value for key, value in vars(model).items() if isinstance(value, (bool, int, float, str))}

    kept = plain()
    try:
        yield
    finally:
        for key in plain().keys() - kept.keys():
            object.__delattr__(model, key)
        for key, value in kept.items():
            object.__setattr__(model, key, value)
