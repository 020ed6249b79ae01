"""Defines every choice of a run, and checks it."""

from kerasdp.config.config import CHECKPOINTS, HANG_TIMEOUT, Config, prepared_workdir

__all__ = ["CHECKPOINTS", "HANG_TIMEOUT", "Config", "prepared_workdir"]
