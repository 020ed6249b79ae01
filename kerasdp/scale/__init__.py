"""Trains models that do not fit on a device: shards of weights, rematerialization, pipelines."""
