"""Defines and checks every option of a run."""

from kerasdp.config.config import BACKENDS, BATCH_NORMS, HANG_TIMEOUT, Config, versions

__all__ = ["BACKENDS", "BATCH_NORMS", "HANG_TIMEOUT", "Config", "versions"]
