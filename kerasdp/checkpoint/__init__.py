"""Checkpoints: the files, the state in them, when they are written, and the finished model."""
