"""Holds what all rooms share: where a training is and how far it may go, and what is made for a model."""

import contextlib
import enum
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Detail(enum.IntEnum):
    """How much a step records: nothing; a few numbers; every layer's output and every weight's gradient, too."""

    NOTHING = 0
    SUMMARY = 1
    EVERYTHING = 2


class StepObserver(Protocol):
    """Records what training steps compute on their way; see `kerasdp.step.observer`."""

    @property
    def detail(self) -> Detail:
        """Returns how much the next step is to record."""

    def on_step(self, loss: Any, samples: Any, seen: dict[str, Any]) -> None:
        """Takes the loss of a step, the indices of its samples, and what it recorded."""


# Called after each step with the loss of its global batch and its learning rate, scalar tensors (None if the step does
# not tell them), and the number of its rows.
StepListener = Callable[[Any, Any, int], None]


class Position(NamedTuple):
    """A place between two steps: `batch` batches of epoch `epoch` (counted from 0) are trained."""

    epoch: int
    batch: int


class Evaluated(NamedTuple):
    """What is evaluated or predicted, maybe at the end of each epoch of a `fit`.

    Attributes:
        num_batches: in all; None if not known.
        batch_size: rows of a full batch.
    """

    num_batches: int | None
    batch_size: int


class RunState:
    """Owns epoch, step, position in the data and the end of a training. Others read it, or call its methods.

    It lives as long as a `Runner`, whose step functions are kept from one `fit` to the next; `begin_fit` resets it.

    Attributes:
        description: of the step functions that run: how the devices share the model.
        observer: records the steps from when it is set, if there is one.
        evaluated: by the running call of `fit`, `evaluate` or `predict`; None: nothing.
        step: updates made.
        first_step: those of the run that is resumed.
        epoch: the current one, from 0.
        batch: batches of the current epoch that are trained, those before a resume point included.
        num_batches: of an epoch; None if that is not known.
        epochs: after which the training ends.
        max_steps: after which it ends; None: nothing but the data ends it.
        batch_size: rows of a full batch.
        epoch_images: rows trained in the current epoch.
        epoch_seconds: of the training part of each epoch that is over.
        epoch_rates: images a second, likewise.
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
        """Resets everything but observer, listeners and `evaluated`. Arguments: see the attributes."""
        self.batch_size, self.num_batches, self.epochs, self.max_steps = batch_size, num_batches, epochs, max_steps
        self.step = self.first_step = self.epoch = self.batch = self.epoch_images = 0
        self.epoch_seconds: list[float] = []
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
        """Returns the context of a step whose batch is a full one, whatever those of the training are."""
        kept, self.batch_size = self.batch_size, num_rows
        try:
            yield
        finally:
            self.batch_size = kept

    def resume(
        self, step: int, position: Position, *, was_stopped: bool = False, measured: dict[str, Any] | None = None
    ) -> None:
        """Continues the training of a checkpoint. Call between `begin_fit` and the first epoch.

        Args:
            step: after which it was saved.
            position: of its next batch.
            was_stopped: whether a callback had ended the training there.
            measured: what `measurements` returned there.
        """
        self.step = self.first_step = step
        self._resume_point, self.epoch = position, position.epoch
        measured = self.measurements() | (measured or {})
        self.epoch_seconds, self.epoch_rates = list(measured["epoch_seconds"]), list(measured["epoch_rates"])
        self._trained_before = measured["images"], measured["seconds"]
        is_at_end = was_stopped or position.epoch >= self.epochs or self.is_at_last_step
        self.was_over = not position.batch and is_at_end

    def begin_epoch(self, epoch: int) -> None:
        """Starts an epoch and its clock."""
        self.epoch, self.is_epoch_cut = epoch, False
        self.batch = self.num_skipped
        self.epoch_images, done = self._trained_before
        self._trained_before = 0, 0.0
        self._clock, self._seconds = time.perf_counter() - done, None

    def after_step(self, loss: Any, indices: Any, seen: dict[str, Any], learning_rate: Any = None) -> None:
        """Counts a step, and tells observer and listeners.

        Args:
            loss: of the global batch, a scalar tensor; None if the step does not tell it.
            indices: in the data set, of the rows of the global batch.
            seen: what `kerasdp.step.observer.observed` recorded.
            learning_rate: with which the weights were updated, a scalar tensor, if the step tells it.
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
        """Notes whether the training stops here, in the middle of an epoch."""
        self.is_epoch_cut = is_stopping and self.batch != self.num_batches

    def stop_clock(self) -> None:
        """Ends the epoch's training part; the validation is not measured. Later calls change nothing."""
        if self._seconds is None and self._clock is not None:
            self._seconds = time.perf_counter() - self._clock

    def end_epoch(self) -> None:
        """Adds the epoch to those that are over."""
        self.stop_clock()
        self.epoch_seconds.append(self.seconds_of_epoch)
        self.epoch_rates.append(self.epoch_images / self.seconds_of_epoch)
        self._clock = None

    def measurements(self) -> dict[str, Any]:
        """Returns what `resume` needs of images and seconds; none of an epoch that is over."""
        is_in_epoch = self._clock is not None
        return {
            "epoch_seconds": self.epoch_seconds,
            "epoch_rates": self.epoch_rates,
            "images": self.epoch_images if is_in_epoch else 0,
            "seconds": self.seconds_of_epoch if is_in_epoch else 0.0,
        }

    @property
    def seconds_of_epoch(self) -> float:
        """Returns the seconds of the current epoch's training part, up to now."""
        if self._seconds is not None or self._clock is None:
            return self._seconds or 0.0
        return time.perf_counter() - self._clock

    @property
    def position(self) -> Position:
        """Returns the position in the data of the next batch to train."""
        return Position(self.epoch, self.batch)

    @property
    def num_skipped(self) -> int:
        """Batches of the current epoch before the resume point."""
        return self._resume_point.batch if self.epoch == self._resume_point.epoch else 0

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole training; None if not known."""
        steps = self.num_batches and self.num_batches * self.epochs
        return min(filter(None, [steps, self.max_steps]), default=None)

    def steps_left(self) -> int | None:
        """Returns how many more steps `max_steps` allows; None if any number."""
        return None if self.max_steps is None else max(self.max_steps - self.step, 0)

    @property
    def is_at_last_step(self) -> bool:
        """Returns whether `max_steps` are done."""
        return self.steps_left() == 0

    @property
    def detail(self) -> Detail:
        """Returns how much the next step is to record."""
        return Detail.NOTHING if self.observer is None else self.observer.detail

    def add_listener(self, listener: StepListener) -> None:
        """Calls `listener(loss, learning_rate, num_rows)` after each step from now on."""
        self._listeners.append(listener)

    def remove_listener(self, listener: StepListener) -> None:
        """Ends what `add_listener` began; nothing if it is over already."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)


T = TypeVar("T")
_ATTRIBUTE = "_kerasdp_caches"


class ModelCache(Generic[T]):
    """One value per model, for step functions and pipeline engines, which are expensive to make.

    These refer to their model. A `WeakKeyDictionary` with models as its keys would therefore keep every model for as
    long as the run: such values can only be held by the model itself. So each model holds one dictionary for all
    caches, by cache and weak in them: no cache can see another's values, and they end with whichever ends first.
    """

    def get(self, model: object) -> T | None:
        """Returns the model's value; None if it has none."""
        return getattr(model, _ATTRIBUTE, {}).get(self)

    def put(self, model: object, value: T) -> None:
        """Sets the model's value."""
        if not hasattr(model, _ATTRIBUTE):
            object.__setattr__(model, _ATTRIBUTE, weakref.WeakKeyDictionary())  # past Keras' tracking of attributes
        getattr(model, _ATTRIBUTE)[self] = value
