"""Chooses TensorFlow devices, and copies arrays to the devices. One process drives all devices."""

import concurrent.futures
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdp.backends.tensorflow import private
from kerasdp.config import Config
from kerasdp.contract import Structure
from kerasdp.processes.devices import AlreadyStartedError, Devices, choose_devices


def make_devices(config: Config, cluster: None = None) -> Devices:
    """Chooses the devices of a run on one machine, and creates the virtual CPU devices.

    GPUs that the run does not use stay free for other programs.

    Raises:
        AlreadyStartedError: if TensorFlow is already initialized with too few CPU devices.
    """
    _keep_logger_quiet()
    private.fold_matmuls()
    gpus = tf.config.list_physical_devices("GPU")
    devices = choose_devices(config, len(gpus))
    tf.config.set_visible_devices(gpus[: devices.count] if devices.kind == "gpu" else [], "GPU")
    if devices.kind == "gpu":
        # TF32 keeps ten bits of a float32. By default TensorFlow (2.21) multiplies in it.
        tf.config.experimental.enable_tensor_float_32_execution(config.may_use_tf32)
        if config.deterministic:  # on CPUs runs are bit-equal without it; XLA has a flag for it, too
            tf.config.experimental.enable_op_determinism()
        if devices.count > 1 and config.may_use_tf32:
            _leave_channels_last(gpus)
    elif devices.count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        try:
            parts = [tf.config.LogicalDeviceConfiguration()] * devices.count
            tf.config.set_logical_device_configuration(cpu, parts)
        except RuntimeError as error:
            if (started := len(tf.config.list_logical_devices("CPU"))) < devices.count:
                raise AlreadyStartedError(f"TensorFlow has only {started} CPU devices") from error
    return devices


def _leave_channels_last(gpus: list[Any]) -> None:
    """Keeps Grappler from transposing images around float32 convolutions, if all GPUs have TF32.

    With TF32, TensorFlow's convolutions (2.21, `ComputeInNhwcEnabled`) run with channels last. Grappler would run each
    convolution with channels first, with a transpose before and after the convolution. Grappler does not know the batch
    norms between the convolutions, because XLA compiles them. Four convolutions with their gradients then had 44
    transposes per step.
    """
    capabilities = [tf.config.experimental.get_device_details(gpu).get("compute_capability", (0, 0)) for gpu in gpus]
    if min(capabilities) >= (8, 0):
        tf.config.optimizer.set_experimental_options({"layout_optimizer": False})


def _keep_logger_quiet() -> None:
    """Hides TensorFlow (2.21) messages that are meant for authors of `tf.distribute` strategies.

    Without this function, notebooks and programs that call `absl.app.run` show these messages.
    """
    logger = tf.get_logger()
    if logger.getEffectiveLevel() == logging.INFO:  # its own in interactive sessions, absl's after `app.run`
        logger.setLevel(logging.WARNING)
    logger.addFilter(_is_not_of_strategies)  # which a logger has once only


def _is_not_of_strategies(record: logging.LogRecord) -> bool:
    return "eagerly has significant overhead" not in str(record.msg)


def device_names(devices: Devices) -> list[str]:
    """Returns TensorFlow's names of the devices, such as `GPU:0`."""
    return [f"{devices.kind.upper()}:{number}" for number in range(devices.count)]


def put_on_device(data: Structure, name: str) -> Structure:
    """Copies arrays to the device with the given name. None leaves stay None."""
    import keras

    with tf.device(name):
        return keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), data)


def keep_on_device(arrays: Structure, name: str) -> Structure:
    """Copies arrays to the device with the given name, as variables from which `take_rows` selects rows.

    Variables have an operation that selects rows on the GPU: `ResourceGather`. The same operation for tensors,
    `GatherV2`, has no kernel for uint8 on GPUs (2.21). Each step would copy the whole tensor to the host. Arrays of
    int32 and of text stay NumPy arrays, because TensorFlow keeps int32 and text in host memory on GPUs.
    """

    def keep(leaf: np.ndarray | None) -> np.ndarray | tf.Variable | None:
        if leaf is None or leaf.dtype == np.int32 or leaf.dtype.kind in "OSU":
            return leaf
        return tf.Variable(leaf, trainable=False)

    def keep_all() -> Structure:
        with tf.device(name):
            return tf.nest.map_structure(keep, arrays)

    # Another thread is outside of the strategy's scope, in which a variable has a copy on each device.
    with concurrent.futures.ThreadPoolExecutor(1) as outside:
        return outside.submit(keep_all).result()


def take_rows(kept: Structure, numbers: np.ndarray, name: str) -> Structure:
    """Selects rows of arrays on the device with the given name.

    Args:
        kept: the arrays that `keep_on_device` returned.
        numbers: the indices of the rows.
        name: TensorFlow's name of the device.
    """
    with tf.device(name):
        rows = tf.convert_to_tensor(numbers)

        def take(leaf: np.ndarray | tf.Variable | None) -> tf.Tensor | None:
            if leaf is None:
                return None
            return leaf.sparse_read(rows) if isinstance(leaf, tf.Variable) else tf.convert_to_tensor(leaf[numbers])

        return tf.nest.map_structure(take, kept)


def start_workers(worker: Callable[..., Any], devices: Devices, settings: Config, train: Callable[..., Any]) -> Any:
    """Calls `worker(devices, settings, train)` in this process, which drives all devices."""
    return worker(devices, settings, train)
