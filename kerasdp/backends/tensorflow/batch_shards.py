"""TensorFlow: splits a process's rows of a batch over its devices."""

import itertools
from typing import TYPE_CHECKING, Any

from kerasdp.backends.base import DeviceBatch, Structure
from kerasdp.backends.tensorflow.cached_rows import keep_on_device, take_rows
from kerasdp.backends.tensorflow.devices import put_on_device
from kerasdp.data.device_cache import CachedRows

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
