"""Trains with torch, jax or tensorflow. Each backend is one folder; `kerasdp.contract` defines its contents."""
