"""Holds all private names of Keras in use: no other module imports `keras.src`, or changes Keras' classes and objects.

Each function says what it is for, the version of Keras whose source was read for it, and whether there is a public way.
What is replaced is put back when the context is left, by `patches`, unless a function says that it is for good.
"""
