"""TensorFlow: keeps arrays on a device, and takes rows of them there."""

import numpy as np
import tensorflow as tf

from kerasdp.backends.base import Structure


def keep_on_device(arrays: Structure, name: str) -> Structure:
    """Copies arrays to the device of this name, as variables.

    Of a tensor, rows of uint8 are taken by `GatherV2`, which (2.21) has no kernel for that on GPUs: each step would
    copy all of it to the host. `ResourceGather`, of a variable, has one. What TensorFlow keeps in host memory there,
    int32 and text, stays with NumPy.
    """

    def keep(leaf: np.ndarray | None) -> np.ndarray | tf.Variable | None:
        if leaf is None or leaf.dtype == np.int32 or leaf.dtype.kind in "OSU":
            return leaf
        return tf.Variable(leaf, trainable=False)

    with tf.device(name):
        return tf.nest.map_structure(keep, arrays)


def take_rows(kept: Structure, numbers: np.ndarray, name: str) -> Structure:
    """Takes rows, by their numbers, of what `keep_on_device` gave; on that device."""
    with tf.device(name):
        rows = tf.convert_to_tensor(numbers)

        def take(leaf: np.ndarray | tf.Variable | None) -> tf.Tensor | None:
            if leaf is None:
                return None
            return leaf.sparse_read(rows) if isinstance(leaf, tf.Variable) else tf.convert_to_tensor(leaf[numbers])

        return tf.nest.map_structure(take, kept)
