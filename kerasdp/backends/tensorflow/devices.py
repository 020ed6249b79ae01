"""TensorFlow: makes the devices of a run, all driven by one process, and brings batches to them."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.backends.base import Structure
from kerasdp.backends.tensorflow.private import fold_matmuls
from kerasdp.config import Config
from kerasdp.errors import UserError
from kerasdp.runtime.devices import Devices, choose_devices


def make_devices(config: Config) -> Devices:
    """Chooses the devices, makes the virtual ones, and leaves GPUs that are not used to other programs."""
    fold_matmuls()
    gpus = tf.config.list_physical_devices("GPU")
    devices = choose_devices(config, len(gpus))
    tf.config.set_visible_devices(gpus[: devices.count] if devices.kind == "gpu" else [], "GPU")
    if devices.kind == "gpu":
        # float32 means float32: TF32 keeps ten bits of it. Use --precision=bfloat16 for speed.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    elif devices.count > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices.count)
        except RuntimeError as error:
            if len(tf.config.list_logical_devices("CPU")) < devices.count:
                raise UserError(
                    f"TensorFlow has already started with {len(tf.config.list_logical_devices('CPU'))} CPU devices, "
                    f"expected {devices.count}: call kerasdp.launch before anything uses TensorFlow, as a model does"
                ) from error
    return devices


def device_names(devices: Devices) -> list[str]:
    """Returns TensorFlow's names of the devices."""
    return [f"{devices.kind.upper()}:{number}" for number in range(devices.count)]


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


def start_workers(worker: Callable[..., Any], devices: Devices, *args: Any) -> Any:
    """Calls `worker(devices, *args)` in this process, which drives all devices."""
    return worker(devices, *args)
