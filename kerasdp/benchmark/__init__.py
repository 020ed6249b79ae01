"""Measures kerasdp, hand-written loops and plain Keras `fit` side by side; and pipelines of many split sizes."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdp.benchmark.contenders import PEERS
    from kerasdp.benchmark.measure import compare
    from kerasdp.benchmark.pipeline_study import measured, stage_work, study
    from kerasdp.benchmark.results import Measured, Measurement

_MODULES = {
    "PEERS": "contenders",
    "Measured": "results",
    "Measurement": "results",
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
