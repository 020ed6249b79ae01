"""All that the kit uses of TensorFlow beyond its public names."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def read_from_first_replica(variables: list[Any]) -> Iterator[None]:
    """Within it, to read one of some variables is to read the first replica's copy, if they are mirrored.

    TensorFlow 2.21: `DistributedVariable._aggregation`, which is otherwise chosen when a variable is made, here by
    Keras. No public way.
    """
    variables = [variable for variable in variables if isinstance(variable, tf.distribute.DistributedValues)]
    kept = [variable._aggregation for variable in variables]
    for variable in variables:
        variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    try:
        yield
    finally:
        for variable, aggregation in zip(variables, kept, strict=True):
            variable._aggregation = aggregation
