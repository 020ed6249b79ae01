"""Manages the devices, processes, signals and restarts of a run."""
