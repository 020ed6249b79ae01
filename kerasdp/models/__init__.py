"""Builds the built-in models: plain Keras, which know nothing of distribution.

Each is called as `f(input_shape=, num_classes=, kernel_initializer=)` and returns a model that gives logits.
"""

import inspect
from typing import Any

from kerasdp.config import Config, choices
from kerasdp.errors import UserError
from kerasdp.runtime.run_state import made_of_choices


def build_model(config: Config, input_shape: tuple[int, ...], num_classes: int) -> Any:
    """Builds `config.model`, a built-in or a user-defined one.

    Args:
        config: `model` is read.
        input_shape: shape of one input, without the batch axis.
        num_classes: number of logits.

    Returns:
        A `keras.Model`.

    Raises:
        UserError: if the user's function cannot be called so, or returns no Keras model.
    """
    import keras

    from kerasdp.models import classifiers

    name, arguments = choices.parse(config.model, "model")
    is_own = choices.is_user_function(name)
    builder = choices.load_user_function(name, "model") if is_own else getattr(classifiers, name)
    if not is_own and isinstance(text := arguments.get("kernel_initializer"), str):
        arguments["kernel_initializer"] = _initializer(text)
    taken = {"input_shape", "num_classes"} & arguments.keys()
    if taken:
        raise UserError(f"--model: {' and '.join(sorted(taken))} come from the data set; leave them out")
    arguments |= {"input_shape": input_shape, "num_classes": num_classes}
    try:
        inspect.signature(builder).bind(**arguments)
    except TypeError as error:
        raise UserError(f"--model: {name} cannot be called with {', '.join(arguments)} ({error})") from error
    try:
        model = builder(**arguments)
    except ValueError as error:
        if is_own:  # with all its frames: the user-defined function may be at fault
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"--model: {name} cannot be built for inputs of shape {input_shape}: {reason}") from error
    if not isinstance(model, keras.Model):
        raise UserError(f"--model: expected {name} to return a Keras model. Received: {type(model).__name__}")
    return made_of_choices(model)


def _initializer(text: str) -> Any:
    import keras

    name, arguments = choices.parse(text, "model")
    # Not the initializer: one that several layers share draws the same values for each.
    identifier = {"class_name": name, "config": arguments} if arguments else name
    try:
        keras.initializers.get(identifier)
        return identifier
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--model: Keras has no such kernel_initializer: {text!r} ({str(error).splitlines()[0]})"
        ) from error
