"""TensorFlow: lets a user-defined step clip the gradients of the global batch, not those of a replica's rows."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kerasdp.backends.tensorflow.optimizer_update import dense


@contextlib.contextmanager
def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Lets `tf.clip_by_global_norm` see means, until it is left; `mean`: as with torch."""
    clip = tf.clip_by_global_norm

    def clip_means(t_list: Any, *args: Any, **kwargs: Any) -> Any:
        return clip(mean(dense(list(t_list))), *args, **kwargs)

    tf.clip_by_global_norm = clip_means
    try:
        yield
    finally:
        tf.clip_by_global_norm = clip
