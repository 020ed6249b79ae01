"""The kit, the frameworks' own loops and plain Keras `fit`, measured side by side."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdp.benchmark.contenders import PEERS
    from kerasdp.benchmark.measure import Measured, compare

__all__ = ["PEERS", "Measured", "compare"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        home = "contenders" if name == "PEERS" else "measure"
        return getattr(importlib.import_module(f"kerasdp.benchmark.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
