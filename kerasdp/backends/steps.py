"""Holds what the step functions of all backends share."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from kerasdp.backends.base import Tensor
from kerasdp.errors import UserError


class DeviceScalar:
    """A number in a tensor on the device, whose value may be read later.

    Several steps of one call give their losses as one tensor; taking it apart would cost a call each.
    """

    def __init__(self, values: Tensor, index: int):
        self.values, self.index = values, index

    def __float__(self) -> float:
        import keras

        return float(keras.ops.convert_to_numpy(self.values)[self.index])

    def is_ready(self) -> bool:
        """Returns whether the device has computed it, which of the backends only jax tells."""
        return getattr(self.values, "is_ready", lambda: True)()

    @classmethod
    def each(cls, values: Any, number: int) -> list[Any]:
        """Returns all of them; Nones if there is no tensor."""
        return [None if values is None else cls(values, index) for index in range(number)]


def all_variables(model: Any) -> list[Any]:
    """Returns the variables of a model, its metrics and its optimizer, once each."""
    optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
    found = *model.variables, *model.metrics_variables, *(optimizer.variables if optimizer is not None else [])
    return list({id(variable): variable for variable in found}.values())


class TrainedWeights:
    """Notices which weights of a model are trained: callbacks freeze layers, and so do scripts between two fits.

    Keras (3.15) follows at once on torch, not before the next `compile` on TensorFlow, and fails on JAX.
    """

    def __init__(self, model: Any):
        """Made once for each set of variables: asking the model itself, in each step, would walk through its layers."""
        from kerasdp.keras_compat.layers import all_layers

        self._model = model
        self._parts = [*all_layers(model), *model.weights]
        self._known: set[tuple[bool, ...]] = set()

    def key(self) -> tuple[bool, ...]:
        """Returns a key of the weights that are trained now: whether each layer and weight is trainable.

        Raises:
            UserError: if the optimizer was not built for some of them.
        """
        key = tuple(part.trainable for part in self._parts)
        if key not in self._known:
            require_known_weights(self._model)
            self._known.add(key)
        return key


def require_known_weights(model: Any) -> None:
    """Raises `UserError` if there are weights to train that the optimizer was not built for."""
    from kerasdp.keras_compat.optimizers import weights_unknown_to

    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return
    for weight in weights_unknown_to(optimizer, model.trainable_weights)[:1]:
        raise UserError(
            f"{weight.path} of {model.name} is to be trained, but was frozen or not there yet when the optimizer was "
            "built: call model.compile again, with a new optimizer"
        )


def learning_rate(optimizer: Any) -> Any:
    """Returns the learning rate of the next step as a tensor, to be read within the step, without a wait."""
    import keras

    return keras.ops.convert_to_tensor(optimizer.learning_rate) * 1.0


# Passes by which the speed of a device is found: those that compile or warm it up, and those that count.
_UNMEASURED, _MEASURED = 2, 5


def median_seconds(run: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Returns the seconds that `run` takes once it is compiled and the device is warm; each time after `before`."""
    times = []
    for _ in range(_UNMEASURED + _MEASURED):
        before()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[_UNMEASURED:])
