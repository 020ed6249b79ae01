"""Makes what flags ask for: the optimizer, the learning rate of each update, and the loss."""

import inspect
import math
from typing import Any

import keras
from keras import ops
from keras.optimizers.schedules import CosineDecay, LearningRateSchedule, PiecewiseConstantDecay, PolynomialDecay

from kerasdp.config import Config, spec
from kerasdp.data.sources import Source
from kerasdp.errors import UserError
from kerasdp.runtime.model_cache import made_of_choices


def make_optimizer(config: Config, train: Source | None = None) -> keras.optimizers.Optimizer:
    """Makes the optimizer and learning rate that the flags ask for.

    Args:
        config: `optimizer`, `learning_rate`, `lr_base_batch`, `schedule`, `warmup` and `ema` are read.
        train: the training data, whose number of samples says where a schedule ends. None: there is no schedule.

    Raises:
        UserError: if Keras has no such optimizer, or it does not take these arguments.
    """
    name, arguments = spec.parse(config.optimizer, "optimizer")
    known = _optimizers()
    if name.lower() not in known:
        raise UserError(f"--optimizer: expected one of {', '.join(known)}. Received: {name!r}")
    if config.ema is not None:
        arguments |= {"use_ema": True, "ema_momentum": config.ema}
    try:
        optimizer = known[name.lower()](**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer: {name} does not take these arguments: {str(error).splitlines()[0]}") from error
    rate = config.scaled_learning_rate(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
    schedule = make_schedule(config, rate, None if train is None else train.num_samples)
    if isinstance(schedule, float):
        optimizer.learning_rate = schedule
        return made_of_choices(optimizer)
    return made_of_choices(known[name.lower()](**(arguments | {"learning_rate": schedule})))


def _optimizers() -> dict[str, Any]:
    """Returns all of `keras.optimizers` by lower-case name but those that hold others.

    `LossScaleOptimizer` comes with --precision.
    """
    base = keras.optimizers.Optimizer
    others = (base, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and value not in others
    }


@keras.saving.register_keras_serializable("kerasdp")
class WarmUp(LearningRateSchedule):
    """Rises to a learning rate, or to the first one of a schedule, which begins behind it.

    Update `n`, from 0, has `(n + 1) / (steps + 1)` of it, so that none is without effect.

    Args:
        rate: a number, or a `LearningRateSchedule`.
        steps: updates until the full rate.
    """

    def __init__(self, rate: float | LearningRateSchedule, steps: int):
        super().__init__()
        self.rate, self.steps = rate, steps

    def __call__(self, step: Any) -> Any:
        """Returns the rate of an update, by its number from 0."""
        step = ops.cast(step, "float32")
        behind = ops.maximum(step - self.steps, 0.0)
        full = self.rate(behind) if isinstance(self.rate, LearningRateSchedule) else self.rate
        return full * ops.minimum((step + 1.0) / (self.steps + 1.0), 1.0)

    def as_keras(self) -> LearningRateSchedule:
        """Returns what an exported model has in its place.

        The same rates for a number and for `CosineDecay`, whose own warm-up does it; another schedule goes without. A
        number stays a schedule: an optimizer keeps a number as one more variable, and would lose its state.
        """
        rate = self.rate
        if isinstance(rate, CosineDecay) and not rate.warmup_steps:
            full, decay_steps, alpha = rate.initial_learning_rate, rate.decay_steps, rate.alpha
        elif isinstance(rate, LearningRateSchedule):
            return rate
        else:
            full, decay_steps, alpha = rate, 1, 1.0
        first = full / (self.steps + 1)
        return CosineDecay(first, decay_steps, alpha, warmup_target=full, warmup_steps=self.steps)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"rate": keras.saving.serialize_keras_object(self.rate), "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WarmUp":
        """Makes it from its arguments."""
        return cls(keras.saving.deserialize_keras_object(config["rate"]), config["steps"])


def make_schedule(config: Config, rate: float, num_samples: int | None) -> float | LearningRateSchedule:
    """Returns the rate that `config.schedule` and `config.warmup` make of a learning rate.

    Args:
        config: `schedule`, `warmup`, `epochs`, `max_steps` and `batch_size` are read.
        rate: the full one.
        num_samples: of an epoch; None: not known.

    Raises:
        UserError: if the number of samples is needed, or the warm-up is longer than the training.
    """
    name, arguments = spec.parse(config.schedule, "schedule")
    wanted = {"step": _step}.get(name, _to_the_end)
    try:
        inspect.signature(wanted).bind(name, rate, 1, 1, **arguments)
    except TypeError as error:
        raise UserError(f"--schedule: {name} does not take these arguments: {error}") from error
    made: float | LearningRateSchedule = rate
    if name != "constant":
        if num_samples is None:
            raise UserError(
                f"--schedule={name} needs the number of samples: expected make_optimizer(config, data.train). "
                "Received: make_optimizer(config)"
            )
        steps_per_epoch = -(-num_samples // config.batch_size)
        num_steps = min(config.epochs * steps_per_epoch, config.max_steps or math.inf)
        if num_steps <= config.warmup:
            raise UserError(f"--warmup: expected less than {num_steps}, all updates. Received: {config.warmup}")
        made = wanted(name, rate, int(num_steps) - config.warmup, steps_per_epoch, **arguments)
    elif arguments:
        raise UserError(f"--schedule: constant takes no arguments. Received: {config.schedule!r}")
    return WarmUp(made, config.warmup) if config.warmup else made


def _to_the_end(name: str, rate: float, num_steps: int, steps_per_epoch: int) -> LearningRateSchedule:
    if name == "cosine":
        return CosineDecay(rate, num_steps)
    return PolynomialDecay(rate, num_steps, end_learning_rate=0.0)


def _step(
    name: str, rate: float, num_steps: int, steps_per_epoch: int, *, every: int = 10, factor: float = 0.1
) -> LearningRateSchedule:
    if not (isinstance(every, int) and every > 0 and factor > 0):
        raise UserError(f"--schedule: step: expected every of at least 1, factor above 0. Received: {every}, {factor}")
    boundaries = list(range(every * steps_per_epoch, num_steps, every * steps_per_epoch))
    # Keras (3.15): the rate changes behind a boundary, so the last update of an epoch is the boundary.
    return PiecewiseConstantDecay(
        [boundary - 1 for boundary in boundaries], [rate * factor**number for number in range(len(boundaries) + 1)]
    )


@keras.saving.register_keras_serializable("kerasdp")
class SmoothedCrossentropy(keras.losses.Loss):
    """Crossentropy of integer labels, of which a share is spread over all classes (Szegedy et al. 2016).

    The numbers are those of `keras.losses.CategoricalCrossentropy(label_smoothing=)` on one-hot labels.

    Args:
        label_smoothing: the share, from 0, below 1.
        name: of the loss.
        reduction: as in `keras.losses.Loss`.
    """

    def __init__(
        self, label_smoothing: float, name: str = "smoothed_crossentropy", reduction: str = "sum_over_batch_size"
    ):
        super().__init__(name=name, reduction=reduction)
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the loss of each sample: labels of shape `(batch,)` or `(batch, 1)`, logits `(batch, classes)`."""
        labels = keras.ops.reshape(keras.ops.cast(y_true, "int32"), keras.ops.shape(y_pred)[:-1])
        targets = keras.ops.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(
            targets, y_pred, from_logits=True, label_smoothing=self.label_smoothing
        )

    def as_keras(self) -> keras.losses.Loss:
        """Returns what an exported model has in its place: Keras has none for integer labels that are smoothed."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=self.reduction)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"label_smoothing": self.label_smoothing, "name": self.name, "reduction": self.reduction}


def make_loss(config: Config) -> keras.losses.Loss:
    """Makes the crossentropy of integer labels and logits, smoothed as `config.label_smoothing` says."""
    if config.label_smoothing:
        return made_of_choices(SmoothedCrossentropy(config.label_smoothing))
    return made_of_choices(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
