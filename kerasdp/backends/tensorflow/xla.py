"""Compiles functions of many small operations with XLA, where that pays."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def has_gpus() -> bool:
    """Returns whether steps run on GPUs."""
    return bool(tf.config.get_visible_devices("GPU"))


def may_compile() -> bool:
    """Returns whether XLA may compile what is being traced: on GPUs, and with `jit_compile=True`, for one replica."""
    return has_gpus() or tf.distribute.get_strategy().num_replicas_in_sync == 1


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with XLA, even if the step around it is not: there each operation costs 5 microseconds.

    Called eagerly it is not compiled, which takes a tenth of a second for each shape and device.
    """

    def without_int32(*args: Any) -> Any:
        return _each(function(*args), tf.int32, tf.uint32)

    in_graphs = tf.function(without_int32, jit_compile=True, autograph=False)

    def call(*args: Any) -> Any:
        return function(*args) if tf.executing_eagerly() else _each(in_graphs(*args), tf.uint32, tf.int32)

    return call


def compiled_on_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function of a few passes over its data, where there are GPUs.

    On the CPU (TensorFlow 2.21) XLA's code has one thread, allocates all that it gives beside what it takes, and is
    compiled for seconds: of a convnet on two devices 4 s before the first step, and 130 MiB, for no faster step.
    """
    by_xla = compiled(function)
    return lambda *args: (by_xla if has_gpus() else function)(*args)


def _each(values: Any, dtype: tf.DType, other: tf.DType) -> Any:
    """Returns tensors of one type as those of another of its size.

    What a function gives in int32 TensorFlow (2.21) keeps in host memory on GPUs, where XLA has made it on the device.
    """

    def bitcast(each: Any) -> Any:
        return tf.bitcast(each, other) if isinstance(each, tf.Tensor) and each.dtype == dtype else each

    return tf.nest.map_structure(bitcast, values)
