"""Data: sources of samples, the order of samples, and the feed that brings batches to the devices."""

from kerasdp.data.datasets import DATASETS, Dataset, from_arrays, load_data
from kerasdp.data.sources import ArraySource, ImageFolder, Source

__all__ = ["DATASETS", "ArraySource", "Dataset", "ImageFolder", "Source", "from_arrays", "load_data"]
