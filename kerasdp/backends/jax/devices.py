"""Chooses JAX devices, initializes JAX, and copies arrays to the devices."""

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kerasdp.backends.jax import processes
from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, Tensor
from kerasdp.errors import UserError
from kerasdp.processes.devices import AlreadyStartedError, Devices, cache_folder, choose_devices
from kerasdp.processes.hardware import num_gpus
from kerasdp.processes.ranks import Cluster

if TYPE_CHECKING:
    import keras


# XLA's flags for bit-equal results on GPUs: sums in a fixed order, and no choice of kernels by their run time. jaxlib
# 0.10.2 ends a process that sets an unknown flag.
_DETERMINISTIC = {"--xla_gpu_deterministic_ops": "true", "--xla_gpu_autotune_level": "0"}

# Whether JAX was started without GPUs that the machine may have, because the run that started it needed fewer.
_has_hidden_gpus = False


def make_devices(config: Config, cluster: Cluster | None = None) -> Devices:
    """Creates the virtual CPU devices, and chooses the devices of a run.

    The function initializes JAX to count the devices. Afterwards the number of CPU devices is fixed.

    Raises:
        AlreadyStartedError: if JAX is already initialized in this process, with other devices or flags than the run
            needs, or without the other processes of the run.
        UserError: if JAX cannot be initialized, if the other processes do not connect, or if the processes have
            different numbers of devices.
    """
    if config.deterministic:
        make_deterministic()
    num_devices = config.num_devices or 1
    if num_devices > 1 or cluster:
        # XLA's CPU devices share one pool with one thread per core, and a collective blocks its thread until the other
        # devices join in. Several collectives of one device can take all threads, and then the run hangs, until XLA
        # ends it after 60 s (jax 0.10.2; often with 4 devices on 2 cores). NPROC sets the size of that pool.
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 16 * num_devices)))
    has_been_started = has_started()
    if not has_been_started:
        jax.config.update("jax_num_cpu_devices", num_devices)
        _choose_platforms(config)
    elif (started := len(jax.local_devices(backend="cpu"))) < num_devices:
        raise AlreadyStartedError(f"JAX has started with {started} of {num_devices} CPU devices")
    elif cluster and jax.process_count() == 1:
        raise AlreadyStartedError("JAX has started as one process; call jax.distributed.initialize before you use JAX")
    with processes.ending_soon(cluster):
        if cluster:
            processes.join(cluster, config)
        kind, num_found = _find_accelerators(config)  # which starts JAX, if nothing has
        if has_been_started:
            _check_hidden(config, num_found)
        if config.device == "auto" and jax.config.values["jax_platforms"] == "cpu":  # also $JAX_PLATFORMS
            config = dataclasses.replace(config, device="cpu")
        devices = choose_devices(config, num_found, kind, cluster)
        counts = collections.Counter(device.process_index for device in _devices_of(devices.kind))
        if len(set(counts.values())) > 1:
            words = ", ".join(f"{counts[process]} in process {process}" for process in sorted(counts))
            raise UserError(f"--gpus: expected the same number of devices per process. Received: {words}; set --gpus")
        return devices


def has_started() -> bool:
    """Returns whether JAX is initialized. Afterwards most options of JAX are fixed."""
    num_cpu_devices = jax.config.values["jax_num_cpu_devices"]
    try:  # JAX (0.10.2) refuses another number once it has started, and has no other public way to know
        jax.config.update("jax_num_cpu_devices", num_cpu_devices + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
    return False


def make_deterministic() -> None:
    """Makes a program on GPUs return bit-equal results in each run, even if each run is a new process.

    The function adds flags to XLA_FLAGS, and keeps the flags of the user. The added flags change nothing on CPUs and
    TPUs.

    Raises:
        AlreadyStartedError: if JAX is already initialized without these flags. Only a new process can be deterministic.
    """
    given = os.environ.get("XLA_FLAGS", "")
    names = [flag.partition("=")[0] for flag in given.split()]
    missing = [f"{name}={value}" for name, value in _DETERMINISTIC.items() if name not in names]
    if missing and has_started():
        raise AlreadyStartedError(f"JAX has started without {' '.join(missing)}; set XLA_FLAGS before you use JAX")
    if missing:
        os.environ["XLA_FLAGS"] = " ".join([*given.split(), *missing])


def start_workers(worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any]) -> Any:
    """Calls `worker(devices, settings, train)` in this process, which drives all devices of its machine."""
    with processes.ending_soon(devices.cluster):
        return worker(devices, settings, train)


def start_jax(devices: Devices, config: Config) -> list[jax.Device]:
    """Sets the options of JAX for a run. Returns the devices of the run."""
    # Otherwise JAX turns arrays of 64-bit values into 32 bits.
    jax.config.update("jax_enable_x64", config.precision == "float64")
    if jax.config.values["jax_compilation_cache_dir"] is None:  # also $JAX_COMPILATION_CACHE_DIR
        jax.config.update("jax_compilation_cache_dir", cache_folder("jax"))
        # jax (0.10.2) keeps what takes a second to compile: not the hundreds of small programs that a model is built
        # and tried with, nor most steps.
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    of_run = _devices_of(devices.kind)[: devices.count]
    if devices.is_accelerator:
        set_precision_of_products(devices.kind, config)
    return of_run


def set_precision_of_products(kind: str, config: Config) -> None:
    """Sets the precision of matrix products and convolutions on GPUs and TPUs to float32 or TF32."""
    # A GPU's TF32 keeps ten bits of a float32, a TPU's bfloat16 seven: both are jax's default. On TPUs that would be
    # another curve, so there float32 means float32. Inputs of 16 bits are multiplied as fast as without this (jax
    # 0.10.2, compiled for v5e and H100).
    precision: str | None = "float32"
    if config.precision == "tf32":
        precision = "tensorfloat32"
    elif config.may_use_tf32 and kind == "gpu":
        precision = os.environ.get("JAX_DEFAULT_MATMUL_PRECISION")
    jax.config.update("jax_default_matmul_precision", precision)


def shardings_over(devices: Sequence[jax.Device]) -> tuple[NamedSharding, NamedSharding]:
    """Returns two shardings over the devices: one copies a tensor to each device, and one splits a tensor by rows."""
    mesh = Mesh(np.array(devices), ("batch",))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))


def lstms_not_for_cudnn(model: "keras.Model", devices: Sequence[jax.Device]) -> list[Any]:
    """Returns the LSTM layers that Keras (3.15) would run with cuDNN, although cuDNN fails for them.

    XLA (jax 0.10.2) cannot split a call of cuDNN over several GPUs. Each GPU would gather and compute the whole batch.
    With 16-bit values, a call of cuDNN does not compile: "Unknown output type". JAX raises this error when it lowers
    the step. At this point, Keras no longer catches the error.
    """
    import keras

    from kerasdp.keras_compat.layers import all_layers

    if devices[0].platform != "gpu":
        return []
    found = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.LSTM) and layer.use_cudnn]
    return [layer for layer in found if len(devices) > 1 or layer.compute_dtype in ("bfloat16", "float16")]


def _choose_platforms(config: Config) -> None:
    """Makes JAX use only the devices that the run needs: the CPU of the host, and as many GPUs as the run uses."""
    global _has_hidden_gpus
    platforms = jax.config.values["jax_platforms"]  # also $JAX_PLATFORMS
    if config.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        _has_hidden_gpus = True
        return
    if platforms and "cpu" not in platforms.split(","):  # models are made in host memory
        jax.config.update("jax_platforms", f"{platforms},cpu")
    is_chosen = jax.config.values["jax_cuda_visible_devices"] != "all"  # by the user
    if config.num_devices and not is_chosen and config.num_devices < num_gpus():
        # JAX takes three quarters of the memory of each GPU that it sees, whether it is used or not.
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(config.num_devices))))
        _has_hidden_gpus = True


def _check_hidden(config: Config, num_found: int) -> None:
    """Raises `AlreadyStartedError` if the run may use GPUs that an earlier run in this process has hidden from JAX."""
    may_have_more = config.device in ("auto", "gpu") and not 0 < (config.num_devices or 0) <= num_found
    if _has_hidden_gpus and may_have_more and (there := num_gpus()) > num_found:
        raise AlreadyStartedError(f"JAX has already started with {num_found} of {there} GPUs")


def _find_accelerators(config: Config) -> tuple[str, int]:
    """Returns the kind and the number of this process's accelerators.

    The number is 0 if the run does not use accelerators.
    """
    if config.device == "cpu":
        return "cpu", 0
    try:
        kind = jax.devices()[0].platform
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"jax cannot start: {reason}; fix the cause, or use --device=cpu") from error
    if config.device not in ("auto", kind):
        return config.device, 0
    return kind, 0 if kind == "cpu" else jax.local_device_count()


def _devices_of(kind: str) -> list[jax.Device]:
    """Returns all JAX devices of a kind, such as `gpu`.

    `jax.devices` takes the name of a plug-in, which may differ from the kind of the plug-in's devices. So the function
    first checks JAX's default devices.
    """
    return default if (default := jax.devices())[0].platform == kind else jax.devices(kind)


def put_rows(rows: np.ndarray, sharding: NamedSharding) -> Tensor:
    """Copies an array to the devices.

    Args:
        rows: the rows of this process, or a full array that is the same in all processes.
        sharding: the sharding of the array over the devices of all processes.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(rows, sharding)
    # `device_put` would let the processes compare what they have, each time.
    return jax.make_array_from_process_local_data(sharding, rows)


def put_whole(array: np.ndarray, sharding: NamedSharding) -> Tensor:
    """Copies a full array to the devices. Each device gets a full copy or its shard, as `sharding` specifies.

    Each process must call this function with the same full array.
    """
    return jax.make_array_from_process_local_data(sharding, array, array.shape)


def put_each(batch: DeviceBatch, shardings: DeviceBatch) -> DeviceBatch:
    """Copies each array of a batch to the devices, like `put_rows`.

    If this process can access all devices, a single call of JAX copies all arrays. This takes half the time of one call
    for each array.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(batch, shardings)
    return jax.tree.map(put_rows, batch, jax.tree.broadcast(shardings, batch))
