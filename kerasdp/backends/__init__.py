"""Contains one package per backend: torch, jax and tensorflow. See `kerasdp.contract` for their common interface."""
