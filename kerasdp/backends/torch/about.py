"""Says which version of PyTorch is installed, and which devices it sees."""

from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Returns the version, the devices, and the versions of the libraries of GPUs."""
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "devices": [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus],
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "cuDNN": torch.backends.cudnn.version() if gpus else None,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
    }
