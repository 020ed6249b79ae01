"""kerasdp trains a Keras model on one or more devices with PyTorch, JAX or TensorFlow, with the same results.

Importing this package loads no framework. The backend is chosen when a run starts.
"""

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# `X as X` is how type checkers know a public name.
from kerasdp.config import Config as Config
from kerasdp.errors import PreemptedError as PreemptedError
from kerasdp.errors import RunError as RunError
from kerasdp.errors import UserError as UserError
from kerasdp.launch import launch as launch
from kerasdp.launch import local_devices as local_devices
from kerasdp.processes.devices import choose_backend, is_installed

if TYPE_CHECKING:
    from kerasdp import flags as flags
    from kerasdp import parity as parity
    from kerasdp.checkpoint.trained import export as export
    from kerasdp.checkpoint.trained import load_model as load_model
    from kerasdp.data.datasets import Dataset as Dataset
    from kerasdp.data.datasets import load_data as load_data
    from kerasdp.data.sampling import Order as Order
    from kerasdp.data.sources import ArraySource as ArraySource
    from kerasdp.data.sources import RecordSource as RecordSource
    from kerasdp.models import build_model as build_model
    from kerasdp.models import load_backbone as load_backbone
    from kerasdp.models import make_optimizer as make_optimizer
    from kerasdp.same import layers as layers
    from kerasdp.same.portable import portable as portable
    from kerasdp.same.replica_context import all_rows as all_rows
    from kerasdp.scale import pipeline as pipeline
    from kerasdp.step.global_batch import per_sample as per_sample
    from kerasdp.step.gradients import value_and_grad as value_and_grad
    from kerasdp.training.runner import Runner as Runner

__version__ = "0.1.0"

# What needs Keras or absl is imported when it is first asked for.
_NAMES_OF = {
    "kerasdp.checkpoint.trained": ("export", "load_model"),
    "kerasdp.data.datasets": ("Dataset", "load_data"),
    "kerasdp.data.sampling": ("Order",),
    "kerasdp.data.sources": ("ArraySource", "RecordSource"),
    "kerasdp.models": ("build_model", "load_backbone", "make_optimizer"),
    "kerasdp.same.portable": ("portable",),
    "kerasdp.same.replica_context": ("all_rows",),
    "kerasdp.step.global_batch": ("per_sample",),
    "kerasdp.step.gradients": ("value_and_grad",),
    "kerasdp.training.runner": ("Runner",),
}
# Modules themselves.
_MODULES = {
    "flags": "kerasdp.flags",
    "layers": "kerasdp.same.layers",
    "parity": "kerasdp.parity",
    "pipeline": "kerasdp.scale.pipeline",
}
_PLACES = _MODULES | {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = sorted(["Config", "PreemptedError", "RunError", "UserError", "launch", "local_devices", *_PLACES])


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _imported(_PLACES[name])
    return module if name in _MODULES else getattr(module, name)


def _imported(name: str) -> Any:
    """Imports a module, and makes sure that Keras uses an installed backend if the module imports Keras.

    If no backend is chosen, Keras (3.15) uses TensorFlow, even if TensorFlow is not installed.
    """
    if "KERAS_BACKEND" in os.environ or "keras" in sys.modules or is_installed("tensorflow"):
        return importlib.import_module(name)
    with contextlib.suppress(UserError):  # that none is installed: it is said where one is needed
        os.environ["KERAS_BACKEND"] = choose_backend(None)
    try:
        return importlib.import_module(name)
    finally:
        os.environ.pop("KERAS_BACKEND", None)
