"""Models larger than a device: cut into stages."""

from kerasdp.pipeline.split import Stage, split, table

__all__ = ["Stage", "split", "table"]
