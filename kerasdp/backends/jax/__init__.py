"""JAX: one process drives all devices."""
