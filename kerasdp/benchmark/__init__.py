"""Measures kerasdp, hand-written loops and plain Keras `fit` side by side; and pipelines of many split sizes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdp.benchmark.contenders import PEERS
    from kerasdp.benchmark.measure import Measured, compare
    from kerasdp.benchmark.pipeline_study import Measurement, measured, stage_work, study

_MODULES = {
    "PEERS": "contenders",
    "Measured": "measure",
    "Measurement": "pipeline_study",
    "compare": "measure",
    "measured": "pipeline_study",
    "stage_work": "pipeline_study",
    "study": "pipeline_study",
}

__all__ = ["PEERS", "Measured", "Measurement", "compare", "measured", "stage_work", "study"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"kerasdp.benchmark.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
