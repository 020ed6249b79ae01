"""A replica's update of its variables once the gradients are there, compiled as one operation."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kerasdp.backends.steps import all_variables


def as_one(model: Any, update: Callable[[], None]) -> None:
    """Calls `update`; all that it assigns, it assigns to this replica's own copies.

    Keras' optimizer (3.15) itself leaves the replicas, with a call for each weight: that cannot be compiled, and its
    small operations, eight a weight, take several times as long as the arithmetic where weights are small.
    """
    import keras

    from kerasdp.backends.tensorflow import xla

    variables = list({id(variable): variable for variable in all_variables(model)}.values())
    changed = []

    def compute(values: list[tf.Tensor]) -> list[tf.Tensor]:
        with _stateless(model.optimizer), keras.StatelessScope(list(zip(variables, values))) as scope:
            update()
        changed[:] = [
            variable for variable, value in zip(variables, values) if scope.get_current_value(variable) is not value
        ]
        return [scope.get_current_value(variable) for variable in changed]

    news = xla.compiled(compute)([tf.convert_to_tensor(variable.value) for variable in variables])
    for variable, new in zip(changed, news, strict=True):
        # Of a mirrored variable this is, within a replica, the handle of that replica's copy.
        tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=new)


def can_be_one(model: Any, gradients: list[Any]) -> bool:
    """Whether the update can be compiled.

    Not with Python of the user's, loss scaling or rows of an embedding, nor where Keras assigns in one of two branches,
    nor (Nadam) where a class extends what would be taken back.
    """
    optimizer = model.optimizer
    parts = [optimizer, getattr(optimizer, "_learning_rate", None)]
    parts += [variable.constraint for variable in model.trainable_weights]
    return (
        all(part is None or _is_keras(type(part)) for part in parts)
        and not hasattr(optimizer, "inner_optimizer")
        and not optimizer.gradient_accumulation_steps
        and not (optimizer.use_ema and optimizer.ema_overwrite_frequency)
        and all(getattr(type(optimizer), name) is own for name, (own, _) in _methods().items())
        and all(gradient is None or isinstance(gradient, tf.Tensor) for gradient in gradients)
        and not tf.executing_eagerly()
    )


def _is_keras(thing: Any) -> bool:
    return thing.__module__.startswith("keras.src.")


def _methods() -> dict[str, tuple[Any, Any]]:
    """Of an optimizer, those that Keras has for TensorFlow, each with the one that it has for any backend."""
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    own, general = vars(TFOptimizer), vars(BaseOptimizer)
    names = [name for name in own if isinstance(general.get(name), types.FunctionType) and name != "__init__"]
    return {name: (own[name], general[name]) for name in names}


@contextlib.contextmanager
def _stateless(optimizer: Any) -> Iterator[None]:
    """Takes back what Keras' optimizers do on TensorFlow alone, which asks for its variables, not their values."""
    methods = {name: types.MethodType(general, optimizer) for name, (_, general) in _methods().items()}
    keys = {id(variable): optimizer._var_key(variable) for variable in optimizer._trainable_variables}
    methods["_var_key"] = lambda variable: keys.get(id(variable))
    for name, method in methods.items():
        object.__setattr__(optimizer, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(optimizer, name)
