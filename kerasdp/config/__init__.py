"""Every choice of a run, checked when it is made."""

from kerasdp.config.config import CHECKPOINTS, Config, prepared_workdir

__all__ = ["CHECKPOINTS", "Config", "prepared_workdir"]
