"""Cuts models into stages and batches into micro-batches, and schedules them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdp.pipeline.partition import Stage, split, table

__all__ = ["Stage", "split", "table"]


def __getattr__(name: str) -> Any:
    # When it is asked for: the engines are imported before Keras may be.
    if name in __all__:
        return getattr(importlib.import_module("kerasdp.pipeline.partition"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
