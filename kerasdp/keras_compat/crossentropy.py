"""Crossentropies that are the same functions of their arguments on all backends, and take no more memory than needed.

Each takes the function of `keras.src.backend.nn` (Keras 3.15) of that name, and returns the one in its place; see
`kerasdp.keras_compat.numerics`.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops


def of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a crossentropy of the values that it is given.

    On TensorFlow, Keras looks where they come from: if from a softmax or sigmoid, it takes the logits behind that, also
    with `from_logits=True`. On other backends it clips the probabilities, and the gradients of what is clipped are 0.
    """

    def crossentropy(target: Any, output: Any, from_logits: bool = False, **axis: Any) -> Any:
        return original(target, ops.copy(output), from_logits=from_logits, **axis)

    return crossentropy


def sparse_of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the crossentropy of classes, of the values that it is given.

    On TensorFlow, Keras normalizes probabilities after it has clipped them, on other backends before: where the
    probability of the class is clipped, gradients are others.
    """

    def crossentropy(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
        output = ops.copy(output)
        if from_logits or axis not in (-1, len(output.shape) - 1):  # which Keras refuses
            return original(target, output, from_logits=from_logits, axis=axis)
        epsilon = keras.backend.epsilon()
        target = ops.cast(target, "int32")
        if len(target.shape) < len(output.shape):
            target = ops.expand_dims(target, -1)
        logs = ops.log(ops.clip(output / ops.sum(output, -1, keepdims=True), epsilon, 1 - epsilon))
        return -ops.squeeze(ops.take_along_axis(logs, target, axis=-1), -1)

    return crossentropy


def sparse_of_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the crossentropy of classes, with one row for each pixel or token.

    On torch, Keras moves the axis of the classes to the second place: of probabilities the gradient then fails (2.13,
    CPU: "grad_input must be contiguous"), and of logits it takes copies of them, in another order.
    """

    def crossentropy(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
        rank, shape = len(output.shape), tuple(output.shape[:-1])
        if rank < 3 or axis not in (-1, rank - 1) or tuple(target.shape) not in (shape, (*shape, 1)):
            return original(target, output, from_logits=from_logits, axis=axis)
        rows = ops.reshape(target, (-1,)), ops.reshape(output, (-1, output.shape[-1]))
        return ops.reshape(original(*rows, from_logits=from_logits), shape)

    return crossentropy


def sparse_by_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the crossentropy of classes that looks the logit of the class up.

    On JAX, Keras multiplies all logarithms by one-hot targets, which of a large vocabulary takes time and memory.
    """

    def crossentropy(target: Any, output: Any, from_logits: bool = False, axis: int = -1) -> Any:
        rank, shape = len(output.shape), tuple(output.shape[:-1])
        if not from_logits or axis not in (-1, rank - 1) or tuple(target.shape) not in (shape, (*shape, 1)):
            return original(target, output, from_logits=from_logits, axis=axis)
        places = ops.reshape(ops.cast(target, "int32"), (*shape, 1))
        return ops.logsumexp(output, axis=-1) - ops.squeeze(ops.take_along_axis(output, places, axis=-1), -1)

    return crossentropy
