"""One folder a backend, with the same file names in each; what the rest of the kit knows of them is in `base`."""
