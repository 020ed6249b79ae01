"""Trains many runs that differ in some choices, one after the other: a grid, or a search by Optuna."""
