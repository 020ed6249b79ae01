"""Layers with one meaning on every backend and device count."""

from kerasdp.layers.batch_normalization import BatchNormalization

__all__ = ["BatchNormalization"]
