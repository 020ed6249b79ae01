"""Holds all private names of TensorFlow in use."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def read_from_first_replica(variables: list[Any]) -> Iterator[None]:
    """Lets reads of these variables, if mirrored, return the first replica's copy.

    TensorFlow 2.21: `DistributedVariable._aggregation`, which is otherwise chosen when a variable is made, here by
    Keras. No public way.
    """
    variables = [variable for variable in variables if isinstance(variable, tf.distribute.DistributedValues)]
    saved = [variable._aggregation for variable in variables]
    for variable in variables:
        variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    try:
        yield
    finally:
        for variable, aggregation in zip(variables, saved, strict=True):
            variable._aggregation = aggregation
