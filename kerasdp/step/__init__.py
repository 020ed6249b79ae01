"""Runs and checks the training step, from the rows of a batch to the update."""
