"""Models larger than a device: cut into stages."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdp.pipeline.stages import Stage, split, table

__all__ = ["Stage", "split", "table"]


def __getattr__(name: str) -> Any:
    # When it is asked for: the engines are imported before Keras may be.
    if name in __all__:
        from kerasdp.pipeline import stages

        return getattr(stages, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
