"""PyTorch: chooses the devices of a run, one process each."""

import torch

from kerasdp.backends.torch.launcher import start_workers
from kerasdp.config import Config
from kerasdp.runtime.devices import Devices, choose_devices

__all__ = ["make_devices", "start_workers"]


def make_devices(config: Config) -> Devices:
    """Chooses the devices; does not start CUDA, so processes may be started afterwards."""
    return choose_devices(config, torch.cuda.device_count())
