"""Holds all private names of Keras in use: no other module imports `keras.src` or patches Keras.

Each function says what it is for, the version of Keras whose source was read for it, and whether there is a public way.
"""
