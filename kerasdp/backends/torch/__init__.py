"""PyTorch: a process a device."""
