"""`Runner` and what works for it during `fit`."""
