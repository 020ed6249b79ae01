"""Trains models that do not fit on one device: sharding, rematerialization, pipelines."""
