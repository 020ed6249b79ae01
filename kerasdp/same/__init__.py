"""Makes models train the same on every backend and device count."""
