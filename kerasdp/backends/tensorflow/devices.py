"""TensorFlow: makes the devices of a run, those of a host driven by one process, and brings batches to them."""

import ctypes
import logging
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.backends.base import Structure
from kerasdp.backends.tensorflow.deterministic import make_deterministic
from kerasdp.backends.tensorflow.hosts import join_hosts
from kerasdp.backends.tensorflow.private import fold_matmuls
from kerasdp.config import Config
from kerasdp.runtime.cluster import Cluster
from kerasdp.runtime.devices import AlreadyStartedError, Devices, choose_devices, share_of_process


def make_devices(config: Config, cluster: Cluster | None = None) -> Devices:
    """Chooses the devices, makes the virtual ones, leaves GPUs that are not used to others, and joins other hosts."""
    _keep_logger_quiet()
    fold_matmuls()
    found = tf.config.list_physical_devices("GPU")
    gpus = [found[number] for number in share_of_process(len(found), cluster)]
    devices = choose_devices(config, len(gpus), cluster=cluster)
    tf.config.set_visible_devices(gpus[: devices.of_process] if devices.kind == "gpu" else [], "GPU")
    if cluster is not None:
        join_hosts(cluster, config, devices.kind)
    if devices.kind == "gpu":
        # float32 means float32: TF32 keeps ten bits of it. Use --precision=bfloat16 for speed.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        if config.deterministic:  # on CPUs runs are bit-equal without it
            make_deterministic()
    elif devices.of_process > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        try:
            parts = [tf.config.LogicalDeviceConfiguration()] * devices.of_process
            tf.config.set_logical_device_configuration(cpu, parts)
        except RuntimeError as error:
            if (started := len(tf.config.list_logical_devices("CPU"))) < devices.of_process:
                raise AlreadyStartedError(f"TensorFlow has already started with {started} CPU devices") from error
    return devices


def _keep_logger_quiet() -> None:
    """Leaves out what TensorFlow (2.21) tells the authors of a strategy, in notebooks at each call of a model."""
    logger = tf.get_logger()
    if logger.level == logging.INFO:  # which it takes in interactive sessions
        logger.setLevel(logging.WARNING)
    logger.addFilter(_is_not_of_strategies)  # which a logger has once only


def _is_not_of_strategies(record: logging.LogRecord) -> bool:
    return "eagerly has significant overhead" not in str(record.msg)


def device_names(devices: Devices) -> list[str]:
    """Returns TensorFlow's names of this process's devices."""
    return [f"{devices.kind.upper()}:{number}" for number in range(devices.of_process)]


def put_on_device(data: Structure, name: str) -> Structure:
    """Copies arrays to the device of this name."""
    import keras

    with tf.device(name):
        return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), data)


def peak_memory_by_device(names: list[str]) -> list[int]:
    """Returns the most bytes that each device has used; nothing if they share one process."""
    if not names[0].startswith("GPU"):
        return []
    return [tf.config.experimental.get_memory_info(name)["peak"] for name in names]


def give_back_memory() -> None:
    """Gives what compiling has freed back to the system, which the C library of Linux otherwise keeps for later.

    XLA compiles an optimizer's update for each device: of 360,000 weights on two devices some 170 MiB are left.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def start_workers(worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any]) -> Any:
    """Calls `worker(devices, settings, train)` in this process, which drives all devices."""
    return worker(devices, settings, train)


def device_name() -> str:
    """Returns the name of the first GPU or TPU, as its maker has it."""
    gpu = tf.config.get_visible_devices("GPU")[0]
    return tf.config.experimental.get_device_details(gpu)["device_name"]
