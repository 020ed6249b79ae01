"""Says which version of TensorFlow is installed, and which devices it sees."""

from typing import Any

import tensorflow as tf


def describe() -> dict[str, Any]:
    """Returns the version, the devices, and the versions of the libraries of GPUs that it was built for."""
    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]
    build = tf.sysconfig.get_build_info()
    return {
        "version": tf.__version__,
        "devices": names,
        "CUDA": build.get("cuda_version"),
        "cuDNN": build.get("cudnn_version"),
    }
