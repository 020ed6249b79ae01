"""Models larger than a device: cut into stages."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdp.pipeline.measurements import Measurement, measured, stage_work, study
    from kerasdp.pipeline.stages import Stage, split, table

__all__ = ["Measurement", "Stage", "measured", "split", "stage_work", "study", "table"]


def __getattr__(name: str) -> Any:
    # When it is asked for: the engines are imported before Keras may be.
    if name in __all__:
        home = "stages" if name in ("Stage", "split", "table") else "measurements"
        return getattr(importlib.import_module(f"kerasdp.pipeline.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
