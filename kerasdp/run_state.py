"""Holds the state of a training run: the epoch, the step, the position in the data, and caches for each model."""

import contextlib
import enum
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Detail(enum.IntEnum):
    """Defines three levels of detail at which a training step records values.

    `NOTHING` records no values. `SUMMARY` records a few scalars. `EVERYTHING` also records the output of each layer and
    the gradient of each weight.
    """

    NOTHING = 0
    SUMMARY = 1
    EVERYTHING = 2


class StepObserver(Protocol):
    """Records values that training steps compute; see `kerasdp.step.observer`."""

    @property
    def detail(self) -> Detail:
        """Returns how much the next step must record."""

    def on_step(self, loss: Any, samples: Any, seen: dict[str, Any]) -> None:
        """Receives the loss of a step, the indices of its samples, and the recorded values."""


# Called after each step with the loss of the global batch, the learning rate, and the number of rows. The first two are
# scalar tensors, or None if the step does not return them.
StepListener = Callable[[Any, Any, int], None]


class Position(NamedTuple):
    """Identifies a point between two training steps of a run.

    At this point, the run has trained on the first `batch` batches of epoch `epoch`. Epochs count from 0.
    """

    epoch: int
    batch: int


class Evaluated(NamedTuple):
    """Describes the data of an evaluation (also within `fit`) or of a prediction.

    Attributes:
        num_batches: number of batches; in `fit`, the total of the evaluations of all epochs. None if not known.
        batch_size: rows of a full batch.
    """

    num_batches: int | None
    batch_size: int


class RunState:
    """Holds the epoch, the step, the position in the data and the end of a training run.

    Only this class changes these values. Other code reads the values, or calls methods of this class. A `Runner` uses
    one `RunState` for all of its calls of `fit`, so its step functions stay valid. `begin_fit` resets the state.

    Attributes:
        description: text of the current step functions that says how the devices share the model.
        observer: object that records the steps, or None.
        evaluated: description of the data that the running `fit`, `evaluate` or `predict` evaluates; None if it
            evaluates no data.
        step: number of weight updates.
        first_step: value of `step` at the resume point; 0 in a new run.
        epoch: index of the current epoch, from 0.
        batch: number of trained batches of the current epoch, including the batches before a resume point.
        num_batches: number of batches of an epoch; None if not known.
        epochs: number of epochs after which the training ends.
        max_steps: number of steps after which the training ends; None if there is no limit.
        batch_size: rows of a full batch.
        epoch_images: number of rows that the current epoch has trained on.
        epoch_seconds: duration of the training part of each finished epoch.
        num_restored: number of entries of `epoch_seconds` from before the resume point, maybe measured on other
            devices.
        epoch_rates: images per second of each finished epoch.
        is_epoch_cut: whether the current epoch ended before its last batch.
    """

    def __init__(self) -> None:
        self.description = ""
        self.observer: StepObserver | None = None
        self.evaluated: Evaluated | None = None
        self._listeners: list[StepListener] = []
        self.begin_fit()

    def begin_fit(
        self,
        *,
        batch_size: int | None = None,
        num_batches: int | None = None,
        epochs: int = 1,
        max_steps: int | None = None,
    ) -> None:
        """Resets the state for a new `fit`. Keeps the observer, the listeners and `evaluated`.

        See the attributes of the class for the arguments.
        """
        self.batch_size, self.num_batches, self.epochs, self.max_steps = batch_size, num_batches, epochs, max_steps
        self.step = self.first_step = self.epoch = self.batch = self.epoch_images = 0
        self.epoch_seconds: list[float] = []
        self.num_restored = 0
        self.epoch_rates: list[float] = []
        self.is_epoch_cut = self.was_over = False
        self._resume_point = Position(0, 0)
        # Images and seconds of the resumed epoch before the resume point.
        self._trained_before = 0, 0.0
        # When the epoch began, and how long its training part took; None outside of an epoch, and until it is over.
        self._clock: float | None = None
        self._seconds: float | None = None

    @contextlib.contextmanager
    def of_full_batch(self, num_rows: int) -> Iterator[None]:
        """Sets the size of a full batch to `num_rows` for one step, and restores the previous size at exit."""
        kept, self.batch_size = self.batch_size, num_rows
        try:
            yield
        finally:
            self.batch_size = kept

    def resume(
        self, step: int, position: Position, *, was_stopped: bool = False, measured: dict[str, Any] | None = None
    ) -> None:
        """Restores the state from a checkpoint. Call it after `begin_fit` and before the first epoch.

        Args:
            step: number of steps at the time of the checkpoint.
            position: position of the next batch.
            was_stopped: whether a callback had stopped the training at this point.
            measured: the result of `measurements` at the time of the checkpoint.
        """
        self.step = self.first_step = step
        self._resume_point, self.epoch = position, position.epoch
        measured = self.measurements() | (measured or {})
        self.epoch_seconds, self.epoch_rates = list(measured["epoch_seconds"]), list(measured["epoch_rates"])
        self.num_restored = len(self.epoch_seconds)
        self._trained_before = measured["images"], measured["seconds"]
        is_at_end = was_stopped or position.epoch >= self.epochs or self.is_at_last_step
        self.was_over = not position.batch and is_at_end

    def begin_epoch(self, epoch: int) -> None:
        """Starts an epoch, and starts to measure its duration."""
        self.epoch, self.is_epoch_cut = epoch, False
        self.batch = self.num_skipped
        self.epoch_images, done = self._trained_before
        self._trained_before = 0, 0.0
        self._clock, self._seconds = time.perf_counter() - done, None

    def after_step(self, loss: Any, indices: Any, seen: dict[str, Any], learning_rate: Any = None) -> None:
        """Updates the step and row counts after a training step. Calls the observer and the listeners.

        Args:
            loss: loss of the global batch, a scalar tensor; None if the step does not return it.
            indices: index in the data set of each row of the global batch.
            seen: values that `kerasdp.step.observer.observed` recorded.
            learning_rate: learning rate of the update, a scalar tensor; None if the step does not return it.
        """
        num_rows = indices.shape[0]
        self.step += 1
        self.batch += 1
        self.epoch_images += num_rows
        if self.observer is not None:
            self.observer.on_step(loss, indices, seen)
        for listener in self._listeners:
            listener(loss, learning_rate, num_rows)

    def after_batch(self, *, is_stopping: bool) -> None:
        """Records whether the training stops in the middle of an epoch."""
        self.is_epoch_cut = is_stopping and self.batch != self.num_batches

    def stop_clock(self) -> None:
        """Stops the measurement of the epoch's duration, so that the duration excludes validation.

        Later calls in the same epoch change nothing.
        """
        if self._seconds is None and self._clock is not None:
            self._seconds = time.perf_counter() - self._clock

    def end_epoch(self) -> None:
        """Appends the duration of the epoch to `epoch_seconds`, and its speed to `epoch_rates`."""
        self.stop_clock()
        self.epoch_seconds.append(self.seconds_of_epoch)
        self.epoch_rates.append(self.epoch_images / self.seconds_of_epoch)
        self._clock = None

    def measurements(self) -> dict[str, Any]:
        """Returns the durations and image counts that `resume` needs.

        Between two epochs, the entries `images` and `seconds` are 0.
        """
        is_in_epoch = self._clock is not None
        return {
            "epoch_seconds": self.epoch_seconds,
            "epoch_rates": self.epoch_rates,
            "images": self.epoch_images if is_in_epoch else 0,
            "seconds": self.seconds_of_epoch if is_in_epoch else 0.0,
        }

    @property
    def seconds_of_epoch(self) -> float:
        """Returns the seconds that the training part of the current epoch has taken so far."""
        if self._seconds is not None or self._clock is None:
            return self._seconds or 0.0
        return time.perf_counter() - self._clock

    @property
    def position(self) -> Position:
        """Returns the epoch and the index of the next batch to train on."""
        return Position(self.epoch, self.batch)

    @property
    def num_skipped(self) -> int:
        """Returns the number of batches of the current epoch before the resume point."""
        return self._resume_point.batch if self.epoch == self._resume_point.epoch else 0

    @property
    def num_steps(self) -> int | None:
        """Returns the number of steps of the whole run; None if not known."""
        steps = self.num_batches and self.num_batches * self.epochs
        return min(filter(None, [steps, self.max_steps]), default=None)

    def steps_left(self) -> int | None:
        """Returns how many more steps `max_steps` allows; None if there is no limit."""
        return None if self.max_steps is None else max(self.max_steps - self.step, 0)

    @property
    def is_at_last_step(self) -> bool:
        """Returns whether the training has done `max_steps` steps."""
        return self.steps_left() == 0

    @property
    def detail(self) -> Detail:
        """Returns how much the next step has to record."""
        return Detail.NOTHING if self.observer is None else self.observer.detail

    def add_listener(self, listener: StepListener) -> None:
        """Registers a listener. Each later step calls `listener(loss, learning_rate, num_rows)`."""
        self._listeners.append(listener)

    def remove_listener(self, listener: StepListener) -> None:
        """Removes a listener. Does nothing if the listener is not registered."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)


T = TypeVar("T")
_ATTRIBUTE = "_kerasdp_caches"


class ModelCache(Generic[T]):
    """Stores one value for each model, such as step functions or a pipeline engine, which are expensive to make.

    Each value refers to its model. So a `WeakKeyDictionary` with models as keys would never free a model. Instead, each
    model stores its values in a dictionary with the caches as weak keys. A value is freed when its model or its cache
    is freed. Different caches have separate values.
    """

    def get(self, model: object) -> T | None:
        """Returns the value for a model; None if there is no value."""
        return getattr(model, _ATTRIBUTE, {}).get(self)

    def put(self, model: object, value: T) -> None:
        """Stores the value for a model."""
        if not hasattr(model, _ATTRIBUTE):
            object.__setattr__(model, _ATTRIBUTE, weakref.WeakKeyDictionary())  # past Keras' tracking of attributes
        getattr(model, _ATTRIBUTE)[self] = value
