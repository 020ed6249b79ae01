"""Makes Keras optimizers by name."""

from typing import Any

import keras

from kerasdp.config import Config, spec
from kerasdp.data.sources import Source
from kerasdp.errors import UserError
from kerasdp.training.schedules import make_schedule


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
        return optimizer
    return known[name.lower()](**(arguments | {"learning_rate": schedule}))


def _optimizers() -> dict[str, Any]:
    """Returns all of `keras.optimizers` by lower-case name; LossScaleOptimizer comes with --precision."""
    base, wrapper = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and value not in (base, wrapper)
    }
