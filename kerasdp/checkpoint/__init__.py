"""Writes and reads checkpoints, and exports trained models."""
