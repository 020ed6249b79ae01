"""TensorFlow: gradients of steps that people write.

Loaded by the backend's name.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.keras_compat.patches import wrapped


def dense(gradients: list[Any]) -> list[Any]:
    """Returns gradients as tensors of their weights' shapes; None stays None.

    That of an embedding is rows and their indices (`tf.IndexedSlices`), a row for each token. Keras (3.15) squares,
    clips and scales these rows one by one, though a token that occurs twice has two: an optimizer with state would get
    other numbers than on other backends, and others again on several devices. Here they are summed.
    """
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def differentiate(
    compute: Callable[[list[Any]], tuple[Any, Any]], values: list[Any], variables: list[Any]
) -> tuple[Any, Any, list[Any]]:
    """Computes a value, and takes its gradients; as with torch."""
    own = values if variables else [tf.identity(value) for value in values]
    with tf.GradientTape() as tape:
        for value in own:  # of variables it knows those that are trained
            tape.watch(value)
        value, aux = compute(own)
    return value, aux, dense(tape.gradient(value, own))


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which `tf.clip_by_global_norm` sees means; `mean`: as with torch."""

    def of_means(clip: Callable[..., Any], t_list: Any, *args: Any, **kwargs: Any) -> Any:
        return clip(mean(dense(list(t_list))), *args, **kwargs)

    return wrapped(tf, clip_by_global_norm=of_means)
