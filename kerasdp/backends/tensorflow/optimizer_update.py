"""TensorFlow: makes gradients dense, and compiles a replica's update of its variables into one operation."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from kerasdp.backends.steps import all_variables


def dense(gradients: list[Any]) -> list[Any]:
    """Returns gradients as tensors of their weights' shapes; None stays None.

    That of an embedding is rows and their indices (`tf.IndexedSlices`), a row for each token. Keras (3.15) squares,
    clips and scales these rows one by one, though a token that occurs twice has two: an optimizer with state would get
    other numbers than on other backends, and others again on several devices. Here they are summed.
    """
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def taking_dense() -> contextlib.AbstractContextManager[None]:
    """Returns the context in which all optimizers make gradients dense first, for a user-defined training step."""
    from kerasdp.keras_compat.optimizers import wrapped_apply

    def apply_dense(
        apply: Callable[..., None], optimizer: Any, grads: Iterable[Any], trainable_variables: Any = None
    ) -> None:
        apply(optimizer, dense(list(grads)), trainable_variables)

    return wrapped_apply(apply_dense)


def as_one(model: Any, update: Callable[[], None]) -> None:
    """Runs `update` as one compiled operation on this replica's copies of the variables.

    Keras' optimizer (3.15) itself leaves the replicas, with a call for each weight: that cannot be compiled, and its
    small operations, eight a weight, take several times as long as the arithmetic where weights are small.
    """
    import keras

    from kerasdp.backends.tensorflow import xla
    from kerasdp.keras_compat.optimizers import updating_values

    variables = list({id(variable): variable for variable in all_variables(model)}.values())

    def compute() -> None:
        # Of a mirrored variable this is, within a replica, the handle of that replica's copy: XLA takes no other.
        handles = [variable.value.handle for variable in variables]
        values = [
            tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.value.dtype), variable.shape)
            for handle, variable in zip(handles, variables, strict=True)
        ]
        with updating_values(model.optimizer), keras.StatelessScope(list(zip(variables, values))) as scope:
            update()
        for variable, handle, value in zip(variables, handles, values, strict=True):
            if (new := scope.get_current_value(variable)) is not value:
                tf.raw_ops.AssignVariableOp(resource=handle, value=new)

    xla.compiled(compute)()


def can_be_one(model: Any) -> bool:
    """Returns whether the update can be compiled.

    Not with user-defined Python or loss scaling, nor where Keras assigns in one of two branches, nor (Nadam) where a
    class extends what would be taken back.
    """
    from kerasdp.keras_compat.layers import is_of_keras
    from kerasdp.keras_compat.optimizers import inner_optimizer, learning_rate_schedule, overrides_nothing_of_tensorflow

    optimizer = model.optimizer
    if inner_optimizer(optimizer) is not optimizer:
        return False
    parts = [optimizer, learning_rate_schedule(optimizer)]
    parts += [variable.constraint for variable in model.trainable_weights]
    return (
        all(part is None or is_of_keras(type(part)) for part in parts)
        and not optimizer.gradient_accumulation_steps
        and not (optimizer.use_ema and optimizer.ema_overwrite_frequency)
        and overrides_nothing_of_tensorflow(optimizer)
        and not tf.executing_eagerly()
    )
