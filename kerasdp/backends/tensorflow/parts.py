"""TensorFlow: variables of the optimizer of which each replica holds a part."""

import contextlib
from typing import Any

import tensorflow as tf

from kerasdp.backends.parts import CutVariables
from kerasdp.backends.tensorflow import collectives
from kerasdp.backends.tensorflow.xla import compiled_on_gpus
from kerasdp.config import Config
from kerasdp.sharding import part_of, part_shape


class Parts(CutVariables):
    """What the replicas hold of the optimizer's variables of one model that are cut, on one machine.

    Parts are the copies of a mirrored variable of their shape, which differ from replica to replica.
    """

    def __init__(self, model: Any, config: Config, mirrored: tf.distribute.Strategy):
        """`mirrored`: makes variables on all devices."""
        super().__init__(model, config, mirrored.num_replicas_in_sync)
        self._mirrored = mirrored

    def number(self) -> int:
        """See `CutVariables`. Within a replica."""
        return collectives.rank()

    def hold(self, variable: Any, axis: int, value: tf.Variable, kept: tf.Variable | None) -> tf.Variable:
        """See `CutVariables`."""
        if kept is None:
            kept = self._made_like(value, tf.zeros(part_shape(value.shape, axis, self.size), value.dtype))
        copies = (self._mirrored.experimental_local_results(each) for each in (value, kept))
        for number, (whole, part) in enumerate(zip(*copies, strict=True)):
            part.assign(part_of(whole, axis, number, self.size))
        self._set(variable, kept)
        return kept

    def whole_of(self, axis: int, kept: tf.Variable) -> tf.Tensor:
        """See `CutVariables`."""
        return tf.concat(self._mirrored.experimental_local_results(kept), axis)

    def hold_whole(self, variable: Any, whole: tf.Tensor, kept: tf.Variable) -> None:
        """See `CutVariables`."""
        self._set(variable, self._made_like(kept, whole))

    def _made_like(self, variable: tf.Variable, value: tf.Tensor) -> tf.Variable:
        with self._mirrored.scope():
            return tf.Variable(
                value, trainable=False, synchronization=variable.synchronization, aggregation=variable.aggregation
            )

    def _set(self, variable: Any, value: tf.Variable) -> None:
        from kerasdp.keras_compat.layers import set_raw_value

        set_raw_value(variable, value)

    def clipping(self, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        """See `CutVariables`: each replica has the wholes of the gradients."""
        from kerasdp.keras_compat.optimizers import taking_parts

        def own(weight: Any, gradient: tf.Tensor) -> tf.Tensor:
            axis = self.axes.get(id(weight))
            return gradient if axis is None else part_of(gradient, axis, self.number(), self.size)

        return taking_parts(optimizer, own)

    def take(self, changed: list[Any], parts: list[tf.Tensor]) -> None:
        """Gives weights, in each replica, what all replicas have made of their parts of them.

        Args:
            changed: weights that are cut.
            parts: the new values of this replica's parts.
        """
        from kerasdp.keras_compat.layers import raw_value

        # Each tensor where its replica has made it: TensorFlow copies it to where it is read.
        by_replica = tf.distribute.get_replica_context().merge_call(
            lambda mirrored, parts: [mirrored.experimental_local_results(part) for part in parts], args=(parts,)
        )

        def write(by_replica: list[tuple[tf.Tensor, ...]]) -> None:
            for weight, each in zip(changed, by_replica, strict=True):
                whole = tf.concat(each, self.axes[id(weight)])
                tf.raw_ops.AssignVariableOp(resource=raw_value(weight).handle, value=whole)

        compiled_on_gpus(write)(by_replica)
