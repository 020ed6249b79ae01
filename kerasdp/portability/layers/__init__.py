"""Layers with one meaning on every backend and device count."""

from kerasdp.portability.layers.batch_normalization import BatchNormalization
from kerasdp.portability.layers.dropout import Dropout, SpatialDropout1D, SpatialDropout2D, SpatialDropout3D

__all__ = ["BatchNormalization", "Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D"]
