"""Writes and reads checkpoints, and exports the finished model."""
