"""TensorFlow: accumulates gradients over micro-batches in a loop, with the activations of one in memory."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.backends.tensorflow.pipeline_engine import Pipeline
from kerasdp.portability.replica_context import ReplicaContext, use


class Accumulation(Pipeline):
    """A pipeline of one stage.

    It loops: with micro-batches side by side in a graph, TensorFlow would run all forward passes at once. As with
    1F1B, gradients are there before all outputs are: a loss must be a sum over the samples.
    """

    def _forward(
        self, inputs: Any, num_rows: int, training: bool, tape: tf.GradientTape | None = None
    ) -> tuple[Any, list[Any]]:
        def work(first: Any, rows: int) -> tuple[list[Any], Any]:
            outputs, penalty = self._part(inputs, num_rows, first, rows, training)
            return outputs, [penalty]

        outputs, penalties = self._each_part(num_rows, work)
        return outputs, penalties

    def _passes(self, inputs: Any, targets: Any, sample_weight: Any, indices: Any) -> tuple[Any, Any, Any]:
        import keras

        from kerasdp.keras_compat import compiled_loss, weight_penalties

        num_rows, weights, optimizer = indices.shape[0], self.model.trainable_weights, self.model.optimizer
        micro_batches = self.plan.micro_batches(num_rows)
        shares = micro_batches.shares(self.model, is_weighted=sample_weight is not None)
        seeds = [(seed, tf.identity(seed.value)) for seed in self.seeds[0]]
        loss_of = compiled_loss(self.model)

        def work(first: Any, rows: int) -> tuple[list[Any], Any]:
            for seed, value in seeds:  # so that a micro-batch draws what its rows draw in the whole batch
                seed.assign(value)
            share = shares[0] if rows == self.plan.size else shares[-1]
            with tf.GradientTape() as tape:
                outputs, penalty = self._part(inputs, num_rows, first, rows, training=True)
                own = tf.nest.map_structure(lambda leaf: _rows(leaf, first, rows), (targets, sample_weight))
                with keras.StatelessScope():  # the losses of several outputs are metrics, too
                    loss = tf.zeros(()) if loss_of is None else loss_of(own[0], self.plan.outputs(outputs), own[1])
                scaled_loss = optimizer.scale_loss(loss * share + penalty)
            return outputs, (penalty, [_dense(gradient) for gradient in tape.gradient(scaled_loss, weights)])

        outputs, (penalty, gradients) = self._each_part(num_rows, work)
        with tf.GradientTape() as tape:
            of_weights = optimizer.scale_loss(sum(weight_penalties(self.model), tf.zeros(())))
        for place, gradient in enumerate(tape.gradient(of_weights, weights)):
            if gradient is not None:
                gradients[place] = gradient if gradients[place] is None else gradients[place] + gradient
        batch = (inputs, targets, outputs, sample_weight)
        return self._loss(batch, [penalty], training=True), batch, gradients

    def _part(self, inputs: Any, num_rows: int, first: Any, rows: int, training: bool) -> tuple[list[Any], Any]:
        """Computes outputs of some rows of the global batch, and their share of the activity penalties."""
        context = ReplicaContext.of_micro_batch(first, rows, gather=lambda statistics: statistics[None])
        (stage,) = self.plan.stages
        with tf.device(self.names[0]), use(context), self.penalties.active():
            values = [_rows(leaf, first, rows) for leaf in self.plan.inputs(inputs)]
            outputs = stage(values, training=training)
            return outputs, sum(context.penalties, tf.zeros(())) * (rows / num_rows)

    def _each_part(self, num_rows: int, work: Callable[[Any, int], tuple[list[Any], Any]]) -> tuple[Any, Any]:
        """Computes outputs of the global batch, and sums over its micro-batches.

        Args:
            num_rows: of the global batch.
            work: takes first row and number of rows of a micro-batch; returns its outputs, and what is to be summed.
                None, in place of a tensor, stays None.
        """
        size = self.plan.size
        num_full, rest = divmod(num_rows, size)
        outputs, sums = work(tf.constant(0), min(size, num_rows))
        pieces, structure = [[leaf] for leaf in outputs], sums

        def add(first: Any, rows: int, sums: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs, found = work(first, rows)
            found = [value for value in tf.nest.flatten(found) if value is not None]
            return outputs, [total + value for total, value in zip(sums, found, strict=True)]

        def body(number: Any, arrays: list[Any], sums: list[Any]) -> tuple[Any, ...]:
            outputs, sums = add(number * size, size, sums)
            arrays = [array.write(number - 1, leaf) for array, leaf in zip(arrays, outputs, strict=True)]
            return _after(sums, number + 1), arrays, sums

        sums = [value for value in tf.nest.flatten(sums) if value is not None]
        if num_full > 1:
            arrays = [tf.TensorArray(leaf.dtype, num_full - 1, element_shape=leaf.shape) for leaf in outputs]
            begin = _after(sums, tf.constant(1)), arrays, sums
            _, arrays, sums = tf.while_loop(lambda number, *_: number < num_full, body, begin, parallel_iterations=1)
            for leaves, array, leaf in zip(pieces, arrays, outputs, strict=True):
                leaves.append(tf.reshape(array.stack(), ((num_full - 1) * size, *leaf.shape[1:])))
        if num_full and rest:
            outputs, sums = add(_after(sums, tf.constant(num_full * size)), rest, sums)
            for leaves, leaf in zip(pieces, outputs, strict=True):
                leaves.append(leaf)
        whole = self.plan.outputs([tf.concat(leaves, 0) for leaves in pieces])
        values = iter(sums)
        return whole, tf.nest.map_structure(lambda value: None if value is None else next(values), structure)


def _after(work: list[Any], number: Any) -> Any:
    """Returns a number that is ready once the work is done, so that what needs it starts no sooner."""
    with tf.control_dependencies(work):
        return tf.identity(number)


def _rows(leaf: Any, first: Any, rows: int) -> Any:
    """Returns some rows of a tensor, with a known shape."""
    if leaf is None:
        return None
    return tf.slice(leaf, [first] + [0] * (len(leaf.shape) - 1), [rows, *leaf.shape[1:]])


def _dense(gradient: Any) -> Any:
    """Returns a gradient that can be added to others; that of an embedding is rows and their indices."""
    return None if gradient is None else tf.convert_to_tensor(gradient)
