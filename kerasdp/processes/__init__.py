"""Chooses the devices of a run, starts its worker processes, and handles signals, failures and restarts."""
