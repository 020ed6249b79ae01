"""What makes a model train the same on every backend and device count."""
