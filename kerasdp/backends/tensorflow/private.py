"""Holds all private names of TensorFlow in use."""

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
    """Lets reads of these variables, if mirrored, return the first replica's copy.

    TensorFlow 2.21: `DistributedVariable._aggregation`, which is otherwise chosen when a variable is made, here by
    Keras. No public way.
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
    """Calls a concrete function of tensors alone, given by their places.

    TensorFlow 2.21: `ConcreteFunction._call_flat`. The public call binds names and compares each tensor with what was
    traced, in Python: a quarter of a millisecond for four tensors, as long as all else that a step does in Python.
    """
    return function._call_flat(tensors, function.captured_inputs)


def forget_gradients(graph: tf.Graph) -> None:
    """Lets a graph that nobody differentiates any more be freed: what `tf.custom_gradient` made in it holds it.

    TensorFlow 2.21: `ops.gradient_registry` keeps each such gradient, with the tensors of its graph, for ever; a sum
    over replicas has two. On two devices a launch left 3 MiB. Graphs within this one keep theirs: others may use them.
    """
    for operation in graph.get_operations():
        if operation.type == "IdentityN" and "_gradient_op_type" in operation.node_def.attr:
            ops.gradient_registry._registry.pop(operation.get_attr("_gradient_op_type").decode(), None)


def mirrored_strategy(devices: list[str]) -> tf.distribute.Strategy:
    """Makes a `MirroredStrategy` whose collectives are not taken for those of another one.

    TensorFlow 2.21: each strategy counts its groups of devices from `_collective_key_base` on, and their collectives
    from 100 on, so that those of a second one meet the shapes of the first one's. No public way.

    Virtual CPU devices have one memory: there a sum on the first of them, which the others then read, takes a tenth of
    the time of a collective, which makes copies and rounds as between machines.

    A Ctrl-C that comes while threads of the replicas are started leaves some waiting for ever, and Python would wait
    for them at its end: they become daemons. No public way: `Strategy.run` makes them.
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
    """Makes products of shapes (a, 1, m, k) and (k, n) right on CPUs, from now on: of one axis less, they are.

    TensorFlow 2.21: where the second of four axes on the left has length 1 and there is one matrix on the right, the
    kernel of oneDNN for `BatchMatMulV2` writes beyond its memory, in graphs and without: of
    `tf.ones((9, 1, 8, 8)) @ tf.ones((8, 8))` a process dies, sooner or later, or gets numbers such as 1e34. Three or
    five axes are right, and so is `TF_ENABLE_ONEDNN_OPTS=0`, with which a step of ResNet-18 takes twice as long.
    No public way: `@` on tensors, `tf.matmul` and the gradients of both look this name up.
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
