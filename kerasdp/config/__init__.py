"""Defines every choice of a run, and checks it."""

from kerasdp.config.config import BACKENDS, BATCH_NORMS, HANG_TIMEOUT, Config, versions

__all__ = ["BACKENDS", "BATCH_NORMS", "HANG_TIMEOUT", "Config", "versions"]
