"""Defines every choice of a run, and checks it."""

from kerasdp.config.config import BACKENDS, BATCH_NORMS, DATASETS, HANG_TIMEOUT, MODELS, Config, versions

__all__ = ["BACKENDS", "BATCH_NORMS", "DATASETS", "HANG_TIMEOUT", "MODELS", "Config", "versions"]
