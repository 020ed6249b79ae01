"""kerasdp: a Keras model trained on one or many devices with PyTorch, JAX or TensorFlow, and learning the same.

Importing this package loads no framework: the backend is chosen when a run starts.
"""

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from kerasdp.config import Config
from kerasdp.errors import PreemptedError, RunError, UserError
from kerasdp.launch import launch, local_devices
from kerasdp.runtime.devices import choose_backend, is_installed

if TYPE_CHECKING:
    from kerasdp import parity, pipeline
    from kerasdp.checkpoint.trained import export, load_model
    from kerasdp.cli.main import main
    from kerasdp.data.batch_reader import Buckets
    from kerasdp.data.datasets import Dataset, load_data
    from kerasdp.data.sampling import Order
    from kerasdp.data.sources import ArraySource, ImageFolder, RecordSource
    from kerasdp.models import build_model, load_backbone
    from kerasdp.portability import layers
    from kerasdp.portability.gradients import portable_step, value_and_grad
    from kerasdp.portability.portable import portable
    from kerasdp.portability.replica_context import all_rows
    from kerasdp.training.optimizers import make_optimizer
    from kerasdp.training.runner import Runner

__version__ = "0.1.0"

# What needs Keras or absl is imported when it is first asked for.
_MODULES = {
    "ArraySource": "kerasdp.data.sources",
    "Buckets": "kerasdp.data.batch_reader",
    "Dataset": "kerasdp.data.datasets",
    "ImageFolder": "kerasdp.data.sources",
    "Order": "kerasdp.data.sampling",
    "RecordSource": "kerasdp.data.sources",
    "Runner": "kerasdp.training.runner",
    "all_rows": "kerasdp.portability.replica_context",
    "build_model": "kerasdp.models",
    "export": "kerasdp.checkpoint.trained",
    "load_backbone": "kerasdp.models",
    "load_data": "kerasdp.data.datasets",
    "load_model": "kerasdp.checkpoint.trained",
    "main": "kerasdp.cli.main",
    "make_optimizer": "kerasdp.training.optimizers",
    "per_sample": "kerasdp.portability.reduction",
    "portable": "kerasdp.portability.portable",
    "portable_step": "kerasdp.portability.gradients",
    "value_and_grad": "kerasdp.portability.gradients",
}

_PACKAGES = {
    "layers": "kerasdp.portability.layers",
    "parity": "kerasdp.parity",
    "pipeline": "kerasdp.pipeline",
}

__all__ = [
    "ArraySource",
    "Buckets",
    "Config",
    "Dataset",
    "ImageFolder",
    "Order",
    "PreemptedError",
    "RecordSource",
    "RunError",
    "Runner",
    "UserError",
    "all_rows",
    "build_model",
    "export",
    "launch",
    "layers",
    "load_backbone",
    "load_data",
    "load_model",
    "local_devices",
    "main",
    "make_optimizer",
    "parity",
    "per_sample",
    "pipeline",
    "portable",
    "portable_step",
    "value_and_grad",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return _imported(_PACKAGES[name])
    if name in _MODULES:
        return getattr(_imported(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(name: str) -> Any:
    """Imports a module, which may import Keras: that takes TensorFlow (3.15) where nobody has chosen."""
    if "KERAS_BACKEND" in os.environ or "keras" in sys.modules or is_installed("tensorflow"):
        return importlib.import_module(name)
    with contextlib.suppress(UserError):  # that none is installed: it is said where one is needed
        os.environ["KERAS_BACKEND"] = choose_backend(None)
    try:
        return importlib.import_module(name)
    finally:
        os.environ.pop("KERAS_BACKEND", None)
