"""TensorFlow: splits a process's rows of a batch over its devices, which may keep the data."""

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, Structure
from kerasdp.backends.tensorflow.devices import put_on_device
from kerasdp.data.sampling import CachedRows

if TYPE_CHECKING:
    from kerasdp.data.batch import Batch


def shard_batch(strategy: Any, batch: "Batch") -> DeviceBatch:
    """Splits a batch over the devices of this process, as `strategy.split` says: lists with an entry a device."""
    import keras

    names = strategy.device_names
    first = strategy.processes.rank * len(names)
    own = strategy.split.replicas(len(batch.indices))[first : first + len(names)]
    places = [slice(*ends) for ends in itertools.pairwise([0, *itertools.accumulate(each.size for each in own)])]

    def each(data: Structure) -> list[Structure]:
        return [
            keras.tree.map_structure(lambda leaf, rows=rows: None if leaf is None else leaf[rows], data)
            for rows in places
        ]

    def put(data: Structure) -> list[Structure]:
        return [put_on_device(shard, name) for shard, name in zip(each(data), names)]

    def keep(arrays: Structure) -> list[Structure]:
        return [keep_on_device(arrays, name) for name in names]

    if isinstance(batch.inputs, CachedRows):
        inputs = [take_rows(*one) for one in zip(batch.inputs.kept.copies(keep), each(batch.inputs.numbers), names)]
    else:
        inputs = put(batch.inputs)
    return DeviceBatch(inputs, put(batch.targets), put(batch.sample_weight), batch.indices)


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
