"""Gathers and sums TensorFlow tensors over all replicas."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.same.replica_context import attributes_kept

# The types that NCCL sums and gathers for TensorFlow (2.21). TensorFlow also accepts bfloat16, but then NCCL fails.
_TYPES = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
# Up to this many bytes, a replica's rows are gathered by a sum.
_MOST_BYTES = 2**20


def sendable(tensor: tf.Tensor) -> tf.Tensor:
    """Casts a tensor to a dtype that devices can exchange. No value changes.

    For example, bfloat16 becomes float32, and uint8 and bool become int32.
    """
    if tensor.dtype in _TYPES:
        return tensor
    return tf.cast(tensor, tf.float32 if tensor.dtype.is_floating else tf.int32)


def rank() -> int:
    """Returns the rank of the replica that is being traced, as a Python number."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


def num_replicas() -> int:
    """Returns the number of replicas of the current strategy."""
    return tf.distribute.get_replica_context().num_replicas_in_sync


def _all_reduce(tensor: tf.Tensor) -> tf.Tensor:
    """Sums a tensor over the replicas. The function is differentiable.

    The gradient of a replica's tensor is the sum of the gradients that all replicas compute for this tensor.
    """

    @tf.custom_gradient
    def reduce(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        context = tf.distribute.get_replica_context()
        with attributes_kept():
            return context.all_reduce(tf.distribute.ReduceOp.SUM, _end_of_walk(tensor)), _all_reduce

    return reduce(tensor)


def _end_of_walk(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor unchanged, and makes `tf.custom_gradient` end its search for variables at this tensor.

    To find variables, `tf.custom_gradient` (TensorFlow 2.21) walks from the outputs of a function back to its inputs.
    It compares each operation with all operations that it has already visited. Tensors from other replicas are not
    inputs of the function. So the walk for each batch norm would continue through the steps of other replicas to their
    first layer. Tracing MobileNetV2 on two devices took minutes.
    """
    return tf.stop_gradient(tensor)


def _stacked(rows: tf.Tensor) -> tf.Tensor:
    """Concatenates the rows of all replicas. Each replica must have the same number of rows.

    The gradient of a replica's rows is the sum of the gradients that all replicas compute for these rows.
    """
    return _all_reduce(zero_pad_to_global_batch(rows))


def gather_rows(rows: tf.Tensor) -> tf.Tensor:
    """Gathers the rows of all replicas. The gradient of the rows is multiplied by the number of replicas.

    See `ShardSteps.gather_shards` for the reason.
    """

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            num_rows = tf.shape(rows)[0]
            first = rank() * num_rows
            return num_replicas() * upstream[first : first + num_rows]

        context = tf.distribute.get_replica_context()
        are_few = rows.shape.is_fully_defined() and rows.shape.num_elements() * rows.dtype.size <= _MOST_BYTES
        if are_few:
            return _stacked(rows), gradient
        with attributes_kept():
            return context.all_gather(_end_of_walk(rows), axis=0), gradient

    return gather(rows)


def zero_pad_to_global_batch(rows: tf.Tensor) -> tf.Tensor:
    """Pads a replica's rows with zeros to the size of the global batch.

    A sum of the padded tensors over the replicas then gathers the rows, with a single collective. TensorFlow's
    `all_gather` (2.21) needs two collectives, because it first exchanges the shapes.
    """
    size, before = rows.shape[0], rank()
    others = [[before * size, (num_replicas() - 1 - before) * size]] + [[0, 0]] * (len(rows.shape) - 1)
    return tf.pad(rows, others)


def gather_statistics(statistics: tf.Tensor, weight: float = 1.0) -> tf.Tensor:
    """Gathers one tensor from each replica, and stacks the tensors along a new first axis.

    The function is differentiable. The gradient of a replica's tensor is the sum of the gradients that all replicas
    compute for this tensor.

    Args:
        statistics: the tensor of this replica.
        weight: this replica's weight in the average of the gradients over the replicas. The mean of all weights is 1.
    """
    if weight != 1.0:  # the gradients of the other replicas have their weights
        statistics = _with_gradient_times(statistics, 1 / weight if weight else 0.0)
    gathered = _stacked(tf.expand_dims(statistics, 0))
    return gathered if weight == 1.0 else _with_gradient_times(gathered, weight)


def sum_gradients(gradient: tf.Tensor, gather: Callable[[tf.Tensor], tf.Tensor], weight: float) -> tf.Tensor:
    """Gathers the weighted gradients of all replicas, and stacks the gradients along a new first axis.

    See `kerasdp.backends.torch.collectives.sum_gradients`.
    """
    if weight == 1.0:
        return gather(gradient)
    gathered = gather(gradient * weight if weight else tf.zeros_like(gradient))
    return gathered / weight if weight else tf.zeros_like(gathered)


def _with_gradient_times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    @tf.custom_gradient
    def same(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(tensor), lambda upstream: upstream * factor if factor else tf.zeros_like(upstream)

    return same(tensor)


def sums(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums each tensor over the replicas, with one collective per dtype."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    sums = _summed([sendable(tensor) for tensor in tensors])()
    return [tf.cast(each, own.dtype) for each, own in zip(sums, tensors)]


def mean(gradients: list[Any], shared: dict[str, tf.Tensor]) -> Callable[[], tuple[list[Any], dict[str, tf.Tensor]]]:
    """Averages gradients over the replicas, and sums other tensors over the replicas, with one collective per dtype.

    Args:
        gradients: dense gradients. An entry that is None stays None.
        shared: the tensors to sum, by name.

    Returns:
        A function that returns the averages and the sums. If this function is compiled together with the code that uses
        the results, the function adds no operation.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    divisor = num_replicas()
    received = _summed([*present, *map(sendable, shared.values())])

    def take_apart() -> tuple[list[Any], dict[str, tf.Tensor]]:
        values = received()
        means = iter([value / divisor for value in values[: len(present)]])
        others = zip(shared.items(), values[len(present) :], strict=True)
        sums = {name: tf.cast(value, own.dtype) for (name, own), value in others}
        return [None if gradient is None else next(means) for gradient in gradients], sums

    return take_apart


def _summed(tensors: list[tf.Tensor]) -> Callable[[], list[tf.Tensor]]:
    """Sums each tensor over the replicas, with one collective per dtype.

    Returns:
        A function that returns the sums in the shapes of the tensors.
    """
    joined = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors if tensor.dtype == dtype], 0)
        joined[dtype] = _all_reduce(flat)

    def take_apart() -> list[tf.Tensor]:
        parts = {}
        for dtype, flat in joined.items():
            own = [tensor for tensor in tensors if tensor.dtype == dtype]
            sizes = [tensor.shape.num_elements() for tensor in own]
            parts[dtype] = iter(tf.split(flat, [tf.size(each) for each in own] if None in sizes else sizes))
        return [tf.reshape(next(parts[tensor.dtype]), tf.shape(tensor)) for tensor in tensors]

    return take_apart
