"""TensorFlow: lets a user-defined step clip the gradients of the global batch, not those of a replica's rows."""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.backends.tensorflow.optimizer_update import dense
from kerasdp.keras_compat.patches import wrapped


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which `tf.clip_by_global_norm` sees means; `mean`: as with torch."""

    def of_means(clip: Callable[..., Any]) -> Callable[..., Any]:
        return lambda t_list, *args, **kwargs: clip(mean(dense(list(t_list))), *args, **kwargs)

    return wrapped(tf, clip_by_global_norm=of_means)
