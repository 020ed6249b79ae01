"""Defines every choice of a run, and checks it."""

from kerasdp.config.config import HANG_TIMEOUT, Config
from kerasdp.config.workdir import CHECKPOINTS, locked_workdir, prepared_workdir

__all__ = ["CHECKPOINTS", "HANG_TIMEOUT", "Config", "locked_workdir", "prepared_workdir"]
