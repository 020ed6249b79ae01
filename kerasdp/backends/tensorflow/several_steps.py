"""TensorFlow: trains on several batches in one call of a graph."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.backends.base import Structure


def several(mirrored: tf.distribute.Strategy, step: Callable[..., Any]) -> Callable[..., Any]:
    """Trains on several batches of one shape; returns their losses and rates, and the last one's logs."""

    def run(num_rows: int, *batches: Any) -> tuple[Any, ...]:
        rest = mirrored.run(_stacked, args=batches[1:])
        loss, rate, logs, _ = step(num_rows, batches[0])
        # A user-defined step may give no loss, and gives no rate; a loop has no place for None.
        found = [value for value in (loss, rate) if value is not None]
        arrays = [tf.TensorArray(value.dtype, len(batches)).write(0, value) for value in found]

        def body(number: tf.Tensor, arrays: list[Any], logs: Any) -> tuple[Any, ...]:
            *values, logs, _ = step(num_rows, mirrored.run(_row, args=(rest, number - 1)))
            values = [value for value in values if value is not None]
            arrays = [array.write(number, value) for array, value in zip(arrays, values)]
            return number + 1, arrays, logs

        _, arrays, logs = tf.while_loop(
            lambda number, *_: number < len(batches), body, (tf.constant(1), arrays, logs), parallel_iterations=1
        )
        stacked = iter([array.stack() for array in arrays])
        losses, rates = (None if value is None else next(stacked) for value in (loss, rate))
        return losses, rates, logs, {}

    return run


def _stacked(*batches: Structure) -> Structure:
    # Not `tf.stack`: for uint8, which images come in, it (2.21) has no kernel on GPUs.
    def stack(*leaves: Any) -> Any:
        return None if leaves[0] is None else tf.concat([leaf[tf.newaxis] for leaf in leaves], 0)

    return tf.nest.map_structure(stack, *batches)


def _row(stacked: Structure, number: tf.Tensor) -> Structure:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[number], stacked)
