"""Compiles functions of many small TensorFlow operations with XLA, if the compiled functions are faster."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def has_gpus() -> bool:
    """Returns whether steps run on GPUs."""
    return bool(tf.config.get_visible_devices("GPU"))


def may_compile() -> bool:
    """Returns whether XLA may compile the code that is being traced.

    On GPUs, XLA may always compile code. On the CPU, XLA may compile code only with `jit_compile=True`, which needs a
    single replica.
    """
    return has_gpus() or tf.distribute.get_strategy().num_replicas_in_sync == 1


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with XLA, even if the step that calls the function is not compiled.

    Without XLA, each operation of the function would cost 5 microseconds in this step. Eager calls are not compiled,
    because compilation takes a tenth of a second for each shape and device.
    """

    def without_int32(*args: Any) -> Any:
        return _each(function(*args), tf.int32, tf.uint32)

    in_graphs = tf.function(without_int32, jit_compile=True, autograph=False)

    def call(*args: Any) -> Any:
        return function(*args) if tf.executing_eagerly() else _each(in_graphs(*args), tf.uint32, tf.int32)

    return call


def compiled_on_gpus(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function with XLA if there are GPUs, so that the function makes few passes over its data.

    On the CPU, the function is not compiled. Code of XLA (TensorFlow 2.21) runs in one thread there, and allocates
    memory for its outputs in addition to its inputs. Compilation takes seconds. For a convnet on two devices, it took 4
    s before the first step, and 130 MiB. The steps were not faster.
    """
    by_xla = compiled(function)
    return lambda *args: (by_xla if has_gpus() else function)(*args)


def _each(values: Any, dtype: tf.DType, other: tf.DType) -> Any:
    """Bitcasts all tensors of one dtype to another dtype of the same size. Leaves all other values unchanged.

    On GPUs, TensorFlow (2.21) keeps int32 results of functions in host memory, but XLA creates these results on the
    device. So compiled functions return uint32 instead of int32.
    """

    def bitcast(each: Any) -> Any:
        return tf.bitcast(each, other) if isinstance(each, tf.Tensor) and each.dtype == dtype else each

    return tf.nest.map_structure(bitcast, values)
