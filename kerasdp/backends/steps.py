"""Holds what the step functions of all backends share."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from kerasdp.backends.base import DeviceBatch, Tensor
from kerasdp.data.sampling import SKIPPED
from kerasdp.errors import UserError
from kerasdp.runtime.run_state import Detail, RunState


def require_device_batch(batch: Any) -> DeviceBatch:
    """Returns the batch, if it comes from a feed.

    Raises:
        UserError: if it is one of Keras' own, from `model.evaluate` in a callback of a running `fit`.
    """
    if not isinstance(batch, DeviceBatch):
        raise UserError(
            "while runner.fit runs, use runner.evaluate in callbacks: model.evaluate has no place for its data"
        )
    return batch


def next_batches(iterator: Iterator[Any], model: Any, run_state: RunState | None = None) -> list[DeviceBatch]:
    """Takes the batches for one call of a step function: as many as the model's `steps_per_execution`, if there are.

    With `run_state`, for training: without those before the resume point, and none after the run's last step.

    Raises:
        StopIteration: if there are none left.
        UserError: as `require_device_batch`.
    """
    taken = [next(iterator), *itertools.islice(iterator, model.steps_per_execution - 1)]
    batches = [require_device_batch(batch) for batch in taken if batch is not SKIPPED]
    return batches if run_state is None else batches[: run_state.steps_left()]


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


def train_on_next_batches(
    iterator: Iterator[Any],
    model: Any,
    run_state: RunState,
    train_step: Callable[[Detail, DeviceBatch], tuple[Tensor, Tensor | None, Any, Any]],
    train_steps: Callable[[list[DeviceBatch]], tuple[Tensor, Tensor | None, Any]],
) -> Any:
    """Trains on the batches for one call of the train function, and tells the run state of each step.

    Args:
        iterator: over batches.
        model: says how many steps a call has.
        run_state: of the run.
        train_step: trains on one batch; returns its loss, learning rate, Keras' logs, and what was observed.
        train_steps: trains on several batches of one shape in one program; returns losses, learning rates, and logs.

    Returns:
        Keras' logs after the last of them.

    Raises:
        StopIteration, UserError: as `next_batches`.
    """
    batches, logs = next_batches(iterator, model, run_state), run_state.skipped_logs
    is_even = len({len(batch.indices) for batch in batches}) == 1  # the one that ends an epoch may be smaller
    if len(batches) > 1 and run_state.observer is None and is_even:
        losses, rates, logs = train_steps(batches)
        each = (DeviceScalar.each(values, len(batches)) for values in (losses, rates))
        for batch, loss, rate in zip(batches, *each):
            run_state.after_step(loss, batch.indices, {}, rate)
        return logs
    for batch in batches:
        loss, rate, logs, seen = train_step(run_state.detail, batch)
        run_state.after_step(loss, batch.indices, seen, rate)
    return logs


def all_variables(model: Any) -> list[Any]:
    """Returns the variables of a model, its metrics and its optimizer."""
    optimizer = getattr(model, "optimizer", None)  # there is none before `compile`
    return [*model.variables, *model.metrics_variables, *(optimizer.variables if optimizer is not None else [])]


class TrainedWeights:
    """Notices which weights of a model are trained: callbacks freeze layers, and so do scripts between two fits.

    Keras (3.15) heeds that at once on torch, not before the next `compile` on TensorFlow, and fails on JAX.
    """

    def __init__(self, model: Any):
        """Made once for each set of variables: asking the model itself, in each step, would walk through its layers."""
        from kerasdp.keras_compat.layers import all_layers

        self._model = model
        self._parts = [*all_layers(model), *model.weights]
        self._known: set[tuple[bool, ...]] = set()

    def key(self) -> tuple[bool, ...]:
        """Returns what differs where other weights are trained.

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
