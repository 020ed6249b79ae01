"""Data: sources of samples, the order of samples, and the feed that brings batches to the devices."""
