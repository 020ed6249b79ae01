"""kerasdp: a Keras model trained on one or many devices with PyTorch, JAX or TensorFlow, and learning the same.

Importing this package loads no framework: the backend is chosen when a run starts.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kerasdp.config import Config
from kerasdp.errors import RunError, UserError
from kerasdp.launch import launch

if TYPE_CHECKING:
    from kerasdp import benchmark, layers, parity, pipeline
    from kerasdp.cli import main, main_benchmark, main_comparison, main_study
    from kerasdp.data.datasets import Dataset, load_data
    from kerasdp.data.sources import ArraySource, ImageFolder
    from kerasdp.models import build_model
    from kerasdp.optimizers import make_optimizer
    from kerasdp.portability import portable
    from kerasdp.runner import Runner
    from kerasdp.saved_model import export

__version__ = "0.1.0"

# What needs Keras or absl is imported when it is first asked for.
_HOMES = {
    "ArraySource": "kerasdp.data.sources",
    "Dataset": "kerasdp.data.datasets",
    "ImageFolder": "kerasdp.data.sources",
    "Runner": "kerasdp.runner",
    "build_model": "kerasdp.models",
    "export": "kerasdp.saved_model",
    "load_data": "kerasdp.data.datasets",
    "main": "kerasdp.cli",
    "main_benchmark": "kerasdp.cli",
    "main_comparison": "kerasdp.cli",
    "main_study": "kerasdp.cli",
    "make_optimizer": "kerasdp.optimizers",
    "portable": "kerasdp.portability",
}

__all__ = [
    "ArraySource",
    "Config",
    "Dataset",
    "ImageFolder",
    "RunError",
    "Runner",
    "UserError",
    "benchmark",
    "build_model",
    "export",
    "launch",
    "layers",
    "load_data",
    "main",
    "main_benchmark",
    "main_comparison",
    "main_study",
    "make_optimizer",
    "parity",
    "pipeline",
    "portable",
]


def __getattr__(name: str) -> Any:
    if name in ("benchmark", "layers", "parity", "pipeline"):
        return importlib.import_module(f"kerasdp.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
