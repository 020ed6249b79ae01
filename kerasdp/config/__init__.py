"""Every choice of a run, checked when it is made."""

from kerasdp.config.config import CHECKPOINTS, Config, check_workdir

__all__ = ["CHECKPOINTS", "Config", "check_workdir"]
