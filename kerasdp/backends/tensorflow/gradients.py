"""Computes the gradients of user-defined steps on TensorFlow.

`kerasdp.value_and_grad` imports the module `gradients` of the current backend.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.keras_compat.patches import wrapped


def dense(gradients: list[Any]) -> list[Any]:
    """Converts gradients to dense tensors with the shapes of their weights. An entry that is None stays None.

    The gradient of an embedding is a `tf.IndexedSlices`: one row for each token, and the indices of the rows. Keras
    (3.15) squares, clips and scales each row separately, although a token that occurs twice has two rows. So an
    optimizer with state would compute other weights than on torch and jax. The weights would also depend on the number
    of devices. This function adds up all rows of the same token.
    """
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def differentiate(
    compute: Callable[[list[Any]], tuple[Any, Any]], values: list[Any], variables: list[Any]
) -> tuple[Any, Any, list[Any]]:
    """Computes a value and its gradients. See `kerasdp.backends.torch.gradients.differentiate`."""
    own = values if variables else [tf.identity(value) for value in values]
    with tf.GradientTape() as tape:
        for value in own:  # of variables it knows those that are trained
            tape.watch(value)
        value, aux = compute(own)
    return value, aux, dense(tape.gradient(value, own))


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `tf.clip_by_global_norm` first averages the gradients over the replicas.

    Args:
        mean: a function that averages gradients over the replicas, if the step needs this average.
    """

    def of_means(clip: Callable[..., Any], t_list: Any, *args: Any, **kwargs: Any) -> Any:
        return clip(mean(dense(list(t_list))), *args, **kwargs)

    return wrapped(tf, clip_by_global_norm=of_means)
