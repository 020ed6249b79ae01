"""Runs Keras' `fit`, `evaluate` and `predict` on all devices of a run."""
