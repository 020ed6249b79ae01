"""Holds all uses of private Keras names: only this package imports `keras.src` and patches Keras' classes and objects.

Each function says what it is for, which version of Keras was read, and why no public API is enough. `patches` restores
replaced attributes at the end of a context, except for patches that are documented as permanent.
"""
