"""Prints what a framework sees of GPUs and TPUs on this machine: python gpu_devices.py BACKEND."""

import json
import sys


def of_torch():
    """CUDA devices, as DistributedDataParallel uses them."""
    import torch

    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if properties else None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl,
        "devices": [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in properties],
    }


def of_jax():
    """Whatever is not a CPU."""
    import jax

    devices = [device for device in jax.devices() if device.platform != "cpu"]
    return {
        "version": jax.__version__,
        "platform": devices[0].client.platform_version.splitlines()[0] if devices else None,
        "devices": [device.device_kind for device in devices],
    }


def of_tensorflow():
    """GPUs."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    build = tf.sysconfig.get_build_info()
    return {
        "version": tf.__version__,
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "devices": [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus],
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps({"torch": of_torch, "jax": of_jax, "tensorflow": of_tensorflow}[sys.argv[1]]()))
