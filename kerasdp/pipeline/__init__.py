"""Models larger than a device: cut into stages."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdp.pipeline.split import Stage, split, table
    from kerasdp.pipeline.study import Measurement, bubble, ideal_bubble, study

# What needs Keras is imported when it is first asked for.
_HOMES = {"Stage": "split", "split": "split", "table": "split"} | dict.fromkeys(
    ("Measurement", "bubble", "ideal_bubble", "study"), "study"
)

__all__ = ["Measurement", "Stage", "bubble", "ideal_bubble", "split", "study", "table"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"kerasdp.pipeline.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
