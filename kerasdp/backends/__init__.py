"""Trains on torch, jax or tensorflow: one folder per backend, the same file names in each; `base` is the contract."""
