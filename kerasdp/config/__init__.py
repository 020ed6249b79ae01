"""Defines every choice of a run, and checks it."""

from kerasdp.config.config import HANG_TIMEOUT, Config
from kerasdp.config.workdir import CHECKPOINTS, prepared_workdir

__all__ = ["CHECKPOINTS", "HANG_TIMEOUT", "Config", "prepared_workdir"]
