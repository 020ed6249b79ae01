"""Makes the optimizer that flags ask for."""

from typing import Any

import keras

from kerasdp.config import Config, choices
from kerasdp.errors import UserError
from kerasdp.runtime.run_state import made_of_choices


def make_optimizer(config: Config) -> keras.optimizers.Optimizer:
    """Makes the optimizer that the flags ask for.

    Args:
        config: `optimizer` and `learning_rate` are read.

    Raises:
        UserError: if Keras has no such optimizer, or it does not take these arguments.
    """
    name, arguments = choices.parse(config.optimizer, "optimizer")
    known = _optimizers()
    if name.lower() not in known:
        raise UserError(f"--optimizer: expected one of {', '.join(known)}. Received: {name!r}")
    if config.learning_rate is not None:
        arguments["learning_rate"] = config.learning_rate
    try:
        return made_of_choices(known[name.lower()](**arguments))
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer: {name} does not take these arguments: {str(error).splitlines()[0]}") from error


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
