"""Trains with JAX: one process drives all devices."""
