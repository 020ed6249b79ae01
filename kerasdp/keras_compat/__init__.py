"""Reads and patches private parts of Keras; no other package of kerasdp imports `keras.src`.

The docstring of each function names the purpose of the function, the version of Keras that it was written for, and why
no public API is enough. Most patches end with a context. Permanent patches are documented as permanent.
"""
