"""JAX: the devices of a run, all driven by one process: how they are made, and how data is brought to them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kerasdp.backends.base import DeviceBatch, Structure, Tensor
from kerasdp.config import Config
from kerasdp.data.device_cache import CachedRows
from kerasdp.errors import UserError
from kerasdp.runtime.devices import AlreadyStartedError, Devices, cache_folder, choose_devices, gpus_to_see

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


def make_devices(config: Config) -> Devices:
    """Makes the virtual CPU devices, and chooses the devices: asking for GPUs starts JAX, which fixes their number."""
    num_devices = config.num_devices or 1
    if num_devices > 1:
        # XLA's CPU devices share one pool with one thread per core, and a collective blocks its thread until the other
        # devices join in. Several collectives of one device can take all threads, and then the run hangs, until XLA
        # ends it after 60 s (jax 0.10.2; often with 4 devices on 2 cores). NPROC sets the size of that pool.
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 16 * num_devices)))
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        if config.device == "cpu":
            jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        if (started := len(jax.devices("cpu"))) < num_devices:
            raise AlreadyStartedError(f"JAX has already started with {started} CPU devices") from error
    if config.device == "cpu":
        return choose_devices(config, 0)
    _leave_other_gpus_alone(config)
    found = accelerators()
    if jax.process_count() > 1:  # of a TPU pod, whose devices JAX shows to each of its processes
        raise UserError(
            f"expected the devices of one host. Received: those of {jax.process_count()}, as in a TPU pod; several "
            "hosts are not there yet on jax: use a slice of one host"
        )
    return choose_devices(config, len(found), found[0].platform if found else "gpu")


def _leave_other_gpus_alone(config: Config) -> None:
    """Lets JAX see as many GPUs as it is to use: it (0.10) reserves three quarters of the memory of each."""
    numbers = gpus_to_see(config.num_devices)
    if numbers is not None and jax.config.values["jax_cuda_visible_devices"] == "all":
        jax.config.update("jax_cuda_visible_devices", numbers)  # no effect once JAX has started


def start_workers(
    worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any], folder: str | None
) -> Any:
    """Calls `worker(devices, settings, train, folder)` in this process, which drives all devices."""
    return worker(devices, settings, train, folder)


def start_jax(devices: Devices, config: Config) -> list[jax.Device]:
    """Applies JAX's settings for a run, and returns its devices."""
    # Whether arrays of 64-bit numbers stay what they are, instead of losing half of their bits.
    jax.config.update("jax_enable_x64", config.precision == "float64")
    if jax.config.values["jax_compilation_cache_dir"] is None:  # also $JAX_COMPILATION_CACHE_DIR
        jax.config.update("jax_compilation_cache_dir", cache_folder("jax"))
    of_run = jax.devices(devices.kind)[: devices.count]
    if devices.is_accelerator:
        # float32 means float32: TF32 keeps ten bits of it, a TPU's default seven. Use --precision=bfloat16 for speed.
        jax.config.update("jax_default_matmul_precision", "float32")
    return of_run


def device_names(devices: Sequence[jax.Device]) -> list[str]:
    """Returns the names of devices, as Keras has them."""
    return [f"{device.platform}:{device.id}" for device in devices]


class DeviceMesh:
    """Devices in a row, and the shardings of tensors over them.

    Attributes:
        size: the number of devices.
        split: the sharding of a tensor of which each device holds equally many rows.
        copied: the sharding of a tensor of which each device holds the whole.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        mesh = Mesh(np.array(devices), ("batch",))
        self.size = mesh.size
        self.split, self.copied = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())


class BatchSharder:
    """Brings batches to the devices.

    Args:
        inputs: the sharding of inputs, targets and sample weights.
        copied: the sharding of tensors that each device holds.
    """

    def __init__(self, inputs: NamedSharding, copied: NamedSharding):
        self._inputs, self._copied = inputs, copied
        self._take = jax.jit(_take, out_shardings=inputs)  # each device its own rows

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings inputs, targets, sample weights and indices to the devices."""
        import keras

        def put(leaf: np.ndarray | None, sharding: NamedSharding) -> Tensor | None:
            return None if leaf is None else jax.device_put(leaf, sharding)

        inputs = batch.inputs
        if isinstance(inputs, CachedRows):
            kept = inputs.kept.copies(lambda arrays: jax.device_put(arrays, self._copied))
            inputs = self._take(kept, put(inputs.numbers, self._inputs))
        else:
            inputs = keras.tree.map_structure(lambda leaf: put(leaf, self._inputs), inputs)
        targets, sample_weight = keras.tree.map_structure(
            lambda leaf: put(leaf, self._inputs), (batch.targets, batch.sample_weight)
        )
        return DeviceBatch(inputs, targets, sample_weight, put(batch.indices.astype("int32"), self._copied))


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """Keeps Keras from sharding batches again, within `fit`, `evaluate` and `predict`."""
    import keras

    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)


def variables_not_on(devices: Sequence[jax.Device], variables: "list[keras.Variable]") -> list[str]:
    """Returns the paths of the variables that are not on all of these devices."""
    return [variable.path for variable in variables if variable.value.sharding.device_set != set(devices)]


def differing_variables(variables: "list[keras.Variable]") -> list[str]:
    """Returns the paths of variables with a shard that differs between devices that hold it."""
    different = []
    for variable in variables:
        shards = variable.value.addressable_shards
        values = {(str(shard.index), np.asarray(shard.data).tobytes()) for shard in shards}
        if len(values) > len({shard for shard, _ in values}):
            different.append(variable.path)
    return different


def peak_memory_by_device(devices: Sequence[jax.Device]) -> list[int]:
    """Returns the most bytes that each device has used; nothing if they share one process."""
    statistics = [device.memory_stats() or {} for device in devices]
    return [figures["peak_bytes_in_use"] for figures in statistics if "peak_bytes_in_use" in figures]


def _take(arrays: Structure, rows: Tensor) -> Structure:
    return jax.tree.map(lambda leaf: leaf[rows], arrays)


def accelerators() -> list[jax.Device]:
    """Returns the GPUs, TPUs or what else JAX takes before the CPU; its platform of GPUs is `"gpu"` of any maker."""
    return [device for device in jax.devices() if device.platform != "cpu"]


def device_name() -> str:
    """Returns the name of the first GPU or TPU, as its maker has it."""
    return accelerators()[0].device_kind
