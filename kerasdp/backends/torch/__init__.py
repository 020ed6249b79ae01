"""Trains with PyTorch: one process per device."""
