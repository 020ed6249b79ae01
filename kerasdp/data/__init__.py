"""Reads samples, orders them, and feeds batches to the devices."""
