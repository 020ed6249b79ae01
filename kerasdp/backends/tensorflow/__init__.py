"""Trains with TensorFlow: one process drives all devices."""
