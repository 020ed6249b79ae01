"""Trains, evaluates and predicts on all devices of a run."""
