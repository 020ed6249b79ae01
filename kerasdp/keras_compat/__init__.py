"""Reads and patches private parts of Keras; no other package of kerasdp imports `keras.src`.

The docstring of each function names its purpose, and the version of Keras that it was written for. It also says why no
public API is enough. Most patches end with a `with` block. The docstrings of the other patches say "permanently".
"""
