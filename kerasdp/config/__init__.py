"""Defines every choice of a run, and checks it."""

from kerasdp.config.config import CHECKPOINTS, Config, prepared_workdir

__all__ = ["CHECKPOINTS", "Config", "prepared_workdir"]
