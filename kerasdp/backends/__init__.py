"""Contains one package per backend: torch, jax and tensorflow. `kerasdp.contract` defines their contents."""
