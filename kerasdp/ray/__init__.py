"""Trains on a Ray cluster: one run over several workers, or many runs at a time. Needs `pip install 'kerasdp[ray]'`."""

from kerasdp.ray.sweep import sweep
from kerasdp.ray.workers import run

__all__ = ["run", "sweep"]
