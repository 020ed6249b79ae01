"""Makes Keras optimizers by name."""

from typing import Any

import keras

from kerasdp.config import Config, spec
from kerasdp.errors import UserError


def make_optimizer(config: Config) -> keras.optimizers.Optimizer:
    """Makes the optimizer and learning rate that the flags ask for.

    Args:
        config: `optimizer`, `learning_rate` and `lr_base_batch` are read.

    Raises:
        UserError: if Keras has no such optimizer, or it does not take these arguments.
    """
    name, arguments = spec.parse(config.optimizer, "optimizer")
    known = _optimizers()
    if name.lower() not in known:
        raise UserError(f"--optimizer: expected one of {', '.join(known)}. Received: {name!r}")
    try:
        optimizer = known[name.lower()](**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer: {name} does not take these arguments: {str(error).splitlines()[0]}") from error
    optimizer.learning_rate = config.scaled_learning_rate(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))
    return optimizer


def _optimizers() -> dict[str, Any]:
    """Returns all of `keras.optimizers` by lower-case name; LossScaleOptimizer comes with --precision."""
    base, wrapper = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and value not in (base, wrapper)
    }
