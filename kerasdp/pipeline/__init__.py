"""Cuts models into stages and batches into micro-batches, and schedules them."""

from kerasdp.pipeline.partition import Stage, split, table

__all__ = ["Stage", "split", "table"]
