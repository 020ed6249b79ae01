"""Records what TensorFlow does, for `--profile`."""

import tensorflow as tf

HOW_TO_OPEN = "pip install xprof, then: xprof --logdir="


def start(folder: str) -> None:
    """Begins to record."""
    tf.profiler.experimental.start(folder)


def stop(folder: str) -> None:
    """Ends the record, and writes it."""
    tf.profiler.experimental.stop()
