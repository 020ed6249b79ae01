"""Trains many runs that differ in some choices, one after the other: a grid, or a search by Optuna."""

from kerasdp.sweep.search import grid, search

__all__ = ["grid", "search"]
