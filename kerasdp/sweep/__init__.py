"""Trains many runs that differ in some choices, one after the other: an Optuna study that is kept in a file."""

from kerasdp.sweep.study import run

__all__ = ["run"]
