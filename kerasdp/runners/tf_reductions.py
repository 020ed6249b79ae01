"""What TensorFlow's replicas join or add up, and what Keras must not add up once more."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def gather_rows(rows: tf.Tensor) -> tf.Tensor:
    """The rows of all replicas; the gradient is that of `Replicas.gather`."""
    context = tf.distribute.get_replica_context()

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        num_rows = tf.shape(rows)[0]

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            first = context.replica_id_in_sync_group * num_rows
            return context.num_replicas_in_sync * upstream[first : first + num_rows]

        return context.all_gather(rows, axis=0), gradient

    return gather(rows)


def gather_statistics(statistics: tf.Tensor) -> tf.Tensor:
    """Stacks a tensor of all replicas; its gradient (TensorFlow's own) adds up what all of them made of it."""
    context = tf.distribute.get_replica_context()
    gathered = context.all_gather(statistics[None], axis=0)
    return tf.ensure_shape(gathered, (context.num_replicas_in_sync, *statistics.shape))  # which it has lost


def mean(gradients: list[Any], others: list[tf.Tensor], precision: str = "float32") -> tuple[list[Any], list[Any]]:
    """The means over the replicas, in one call a type; a weight that the loss does not depend on keeps its None.

    With a `precision` of `"bfloat16"` gradients are sent and added up in it; but not those of an embedding, which are
    rows and their places: TensorFlow (2.21) gathers no bfloat16.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    sent = present
    if precision != "float32":
        sent = [tf.cast(each, precision) if isinstance(each, tf.Tensor) else each for each in present]
    received = [*sent, *others]
    for dtype in dict.fromkeys(value.dtype for value in received):  # TensorFlow (2.21) joins a list into one tensor
        places = [place for place, value in enumerate(received) if value.dtype == dtype]
        values = [received[place] for place in places]
        values = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, values)
        for place, value in zip(places, values, strict=True):
            received[place] = value
    means = iter([tf.cast(value, gradient.dtype) for value, gradient in zip(received, present)])
    return [None if gradient is None else next(means) for gradient in gradients], received[len(sent) :]


@contextlib.contextmanager
def no_gradient_sum(optimizer: Any) -> Iterator[None]:
    """Within it, a Keras optimizer takes gradients that have been reduced already.

    Its own sum comes too late (Keras 3.15): clipping and loss scaling would see one replica's gradients.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    optimizers = [each for each in (optimizer, inner) if each is not None]
    for each in optimizers:
        object.__setattr__(each, "_all_reduce_sum_gradients", lambda gradients_and_variables: gradients_and_variables)
    try:
        yield
    finally:
        for each in optimizers:
            object.__delattr__(each, "_all_reduce_sum_gradients")


@contextlib.contextmanager
def loss_of_whole_batch() -> Iterator[None]:
    """Within it, Keras' losses are not divided by the number of replicas.

    Keras (3.15) divides those that take a mean, not those that take a sum or are the user's own, so that no
    later factor could be right for all. Here each replica has the whole batch's loss: nothing is to be divided.
    """
    from keras.src.losses import loss as loss_module

    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    originals = [getattr(loss_module, name) for name in names]
    for name in names:
        setattr(loss_module, name, lambda value: value)
    try:
        yield
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(loss_module, name, original)
