"""Compiles functions of many small TensorFlow operations with XLA, where that pays off."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def has_gpus() -> bool:
    """Returns whether steps run on GPUs."""
    return bool(tf.config.get_visible_devices("GPU"))


def may_compile() -> bool:
    """Returns whether XLA may compile the code that is being traced.

    It may on GPUs, and also with `jit_compile=True`, which needs a single replica.
    """
    return has_gpus() or tf.distribute.get_strategy().num_replicas_in_sync == 1


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with XLA, even if the step around it is not compiled.

    There each operation would cost 5 microseconds. An eager call is not compiled, because that takes a tenth of a
    second for each shape and device.
    """

    def without_int32(*args: Any) -> Any:
        return _each(function(*args), tf.int32, tf.uint32)

    in_graphs = tf.function(without_int32, jit_compile=True, autograph=False)

    def call(*args: Any) -> Any:
        return function(*args) if tf.executing_eagerly() else _each(in_graphs(*args), tf.uint32, tf.int32)

    return call


def compiled_on_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that makes few passes over its data, if there are GPUs.

    On the CPU (TensorFlow 2.21) XLA's code has one thread, and allocates memory for its outputs in addition to its
    inputs. Compiling takes seconds. For a convnet on two devices it took 4 s before the first step, and 130 MiB. The
    steps were not faster.
    """
    by_xla = compiled(function)
    return lambda *args: (by_xla if has_gpus() else function)(*args)


def _each(values: Any, dtype: tf.DType, other: tf.DType) -> Any:
    """Bitcasts all tensors of one type to another type of the same size.

    TensorFlow (2.21) keeps int32 results of functions in host memory on GPUs, but XLA makes them on the device.
    """

    def bitcast(each: Any) -> Any:
        return tf.bitcast(each, other) if isinstance(each, tf.Tensor) and each.dtype == dtype else each

    return tf.nest.map_structure(bitcast, values)
