"""Makes the optimizer that flags ask for."""

from typing import Any

import keras

from kerasdp.config import Config, choices
from kerasdp.errors import UserError
from kerasdp.run_state import made_of_choices


def make_optimizer(config: Config) -> keras.optimizers.Optimizer:
    """Makes the optimizer that the flags ask for.

    Args:
        config: `optimizer` and `learning_rate` are read.

    Raises:
        UserError: if Keras has no such optimizer, or it does not take these arguments.
    """
    name, arguments = choices.parse(config.optimizer, "optimizer")
    base = keras.optimizers.Optimizer
    # Those that hold others are none to choose; `LossScaleOptimizer` comes with --precision.
    left_out = (base, keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    known: dict[str, Any] = {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and value not in left_out
    }
    if name.lower() not in known:
        raise UserError(f"--optimizer: expected one of {', '.join(known)}. Received: {name!r}")
    if config.learning_rate is not None:
        arguments["learning_rate"] = config.learning_rate
    try:
        return made_of_choices(known[name.lower()](**arguments))
    except (TypeError, ValueError) as error:
        raise UserError(f"--optimizer: {name} does not take these arguments: {str(error).splitlines()[0]}") from error
