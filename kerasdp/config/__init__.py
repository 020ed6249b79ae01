"""Defines every choice of a run, and checks it."""

from kerasdp.config.config import BACKENDS, BATCH_NORMS, DATASETS, HANG_TIMEOUT, MODELS, TRACKERS, Config, versions
from kerasdp.config.workdir import CHECKPOINTS, locked_workdir, prepared_workdir

__all__ = [
    "BACKENDS", "BATCH_NORMS", "CHECKPOINTS", "DATASETS", "HANG_TIMEOUT", "MODELS", "TRACKERS", "Config",
    "locked_workdir", "prepared_workdir", "versions",
]  # fmt: skip
