"""Wraps the private functions of TensorFlow that kerasdp uses."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_math_ops


@contextlib.contextmanager
def read_from_first_replica(variables: list[Any]) -> Iterator[None]:
    """Returns a context in which reading a mirrored variable returns the first replica's copy.

    TensorFlow 2.21: the context sets `DistributedVariable._aggregation`. Normally the aggregation is an argument when a
    variable is created, but Keras creates these variables. No public function changes the aggregation later.
    """
    variables = [variable for variable in variables if isinstance(variable, tf.distribute.DistributedValues)]
    saved = [variable._aggregation for variable in variables]
    for variable in variables:
        variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    try:
        yield
    finally:
        for variable, aggregation in zip(variables, saved, strict=True):
            variable._aggregation = aggregation


def call_flat(function: Any, tensors: list[tf.Tensor]) -> Any:
    """Calls a concrete function with a flat list of tensors.

    TensorFlow 2.21: `ConcreteFunction._call_flat`. The public call binds argument names, and compares each tensor with
    the traced tensor in Python. For four tensors, this takes a quarter of a millisecond, as long as all other
    Python code of a step.
    """
    return function._call_flat(tensors, function.captured_inputs)


def forget_gradients(graph: tf.Graph) -> None:
    """Removes the custom gradients of a graph from TensorFlow's registry, so that Python can free the graph.

    The graph must not be differentiated again. TensorFlow 2.21: `ops.gradient_registry` keeps each gradient of
    `tf.custom_gradient` forever, together with the tensors of its graph. A sum over replicas has two gradients. Without
    this function, each launch on two devices leaked 3 MiB. Gradients of nested graphs stay in the registry, because
    other graphs may use these gradients.
    """
    for operation in graph.get_operations():
        if operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr:
            ops.gradient_registry._registry.pop(operation.get_attr("_gradient_op_type").decode(), None)


def mirrored_strategy(devices: list[str]) -> tf.distribute.Strategy:
    """Creates a `MirroredStrategy` with unique collective keys, fast sums on CPUs and daemon threads.

    Keys (TensorFlow 2.21): a strategy numbers its groups of devices from `_collective_key_base`, and the collectives of
    each group from 100. A second strategy would use the same numbers for collectives with other shapes. There is no
    public option.

    Sums: virtual CPU devices share one memory. A collective would still copy the data, and send it in rounds as between
    machines. Here the first device computes the sum, and the other devices read it. This takes a tenth of the time.

    Threads: `Strategy.run` creates the threads of the replicas. If Ctrl-C arrives at this moment, some threads wait
    forever. Python would wait for these threads when the program ends, so this function makes them daemon threads.
    There is no public option.
    """
    on_one = tf.distribute.ReductionToOneDevice("CPU:0") if devices[0].startswith("CPU") else None
    mirrored_run._MirroredReplicaThread.start = _start_as_daemon
    kind = tf.distribute.MirroredStrategy
    strategy = kind(devices, on_one)
    kind._collective_key_base += 1000  # of the next one
    return strategy


def _start_as_daemon(thread: threading.Thread) -> None:
    thread.daemon = True
    threading.Thread.start(thread)


def fold_matmuls() -> None:
    """Replaces TensorFlow's matrix product on CPUs, because it is wrong for shapes (a, 1, m, k) and (k, n).

    TensorFlow 2.21: oneDNN's kernel for `BatchMatMulV2` writes beyond its memory for these shapes. The left side has
    four axes, and its second axis has length 1. The right side is one matrix. The error occurs in graphs and in eager
    calls. After `tf.ones((9, 1, 8, 8)) @ tf.ones((8, 8))`, a process crashes sooner or later, or gets values such as
    1e34. The replacement merges the first two axes of the left side.

    Products with three or five axes are correct. `TF_ENABLE_ONEDNN_OPTS=0` also avoids the error, but a step of
    ResNet-18 then takes twice as long. There is no public option: `@` on tensors, `tf.matmul` and the gradients of both
    look up the private name `gen_math_ops.batch_mat_mul_v2`.
    """
    original = gen_math_ops.batch_mat_mul_v2
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def batch_mat_mul_v2(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        left, right = (tf.TensorShape(getattr(operand, "shape", None)) for operand in (x, y))
        is_one_matrix = right.rank is not None and all(length == 1 for length in right[:-2])
        if left.rank != 4 or left[1] not in (1, None) or not is_one_matrix:
            return original(x, y, *args, **kwargs)
        lengths, (rows, columns) = tf.shape(x), tf.unstack(tf.shape(y)[-2:])
        folded = original(
            tf.reshape(x, tf.concat([[lengths[0] * lengths[1]], lengths[2:]], 0)),
            tf.reshape(y, [rows, columns]),
            *args,
            **kwargs,
        )
        result = tf.reshape(folded, tf.concat([lengths[:2], tf.shape(folded)[1:]], 0))
        result.set_shape([*left[:2], *folded.shape[1:]])
        return result

    gen_math_ops.batch_mat_mul_v2 = batch_mat_mul_v2
