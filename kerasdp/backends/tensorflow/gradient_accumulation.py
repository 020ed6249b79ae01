"""TensorFlow: accumulates gradients over micro-batches in a loop, with the activations of one in memory."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdp.backends.base import Structure, Tensor
from kerasdp.backends.tensorflow.optimizer_update import dense
from kerasdp.backends.tensorflow.pipeline_engine import Pipeline
from kerasdp.backends.tensorflow.pipeline_stage import total
from kerasdp.portability.replica_context import ReplicaContext, alone, use


class Accumulation(Pipeline):
    """Trains a model on one device, by micro-batches: a pipeline of one stage that makes its passes in a loop.

    With micro-batches side by side in a graph, as in `Pipeline`, TensorFlow would run all forward passes at once. As
    with 1F1B, gradients are there before all outputs are: a loss must be a sum over the samples.

    A subclass, as all that it does otherwise is two methods, `_forward` and `_passes`, and these need the plan (which
    changes), the seeds, the penalties and the loss of the engine.
    """

    def _forward(self, inputs: Structure, num_rows: int) -> tuple[Structure, list[Tensor]]:
        def work(first: Tensor, rows: int) -> tuple[list[Tensor], Structure]:
            outputs, penalty = self._micro_batch(inputs, num_rows, first, rows, training=False)
            return outputs, [penalty]

        outputs, penalties = self._sum_over_micro_batches(num_rows, work)
        return outputs, penalties

    def _passes(
        self, inputs: Structure, targets: Structure, sample_weight: Structure, indices: Tensor
    ) -> tuple[Tensor, tuple[Structure, ...], list[Tensor]]:
        num_rows, weights, optimizer = indices.shape[0], self.model.trainable_weights, self.model.optimizer
        micro_batches = self.plan.micro_batches(num_rows)
        shares = micro_batches.shares(self.model, is_weighted=sample_weight is not None)
        seeds = [(seed, tf.identity(seed.value)) for seed in self.programs[0].seeds]

        def work(first: Tensor, rows: int) -> tuple[list[Tensor], Structure]:
            for seed, value in seeds:  # so that a micro-batch draws what its rows draw in the whole batch
                seed.assign(value)
            share = shares[0] if rows == self.plan.size else shares[-1]
            with tf.GradientTape() as tape:
                outputs, penalty = self._micro_batch(inputs, num_rows, first, rows, training=True)
                own = tf.nest.map_structure(lambda leaf: _rows(leaf, first, rows), (targets, sample_weight))
                loss = self._loss_of_part(own[0], self.plan.outputs(outputs), own[1])
                scaled_loss = optimizer.scale_loss(loss * share + penalty)
            return outputs, (penalty, dense(tape.gradient(scaled_loss, weights)))

        outputs, (penalty, gradients) = self._sum_over_micro_batches(num_rows, work)
        batch = (inputs, targets, outputs, sample_weight)
        return self._loss(batch, [penalty]), batch, self._with_weight_penalties(gradients)

    def _micro_batch(
        self, inputs: Structure, num_rows: int, first: Tensor, rows: int, training: bool
    ) -> tuple[list[Tensor], Structure]:
        """Computes outputs of some rows of the global batch, and their share of the activity penalties."""
        from kerasdp.portability.row_search import row_axes_of

        own = {"num_rows": rows, "rows": rows, "first_row": first, "total_rows": num_rows}
        context = ReplicaContext(num_replicas=1, row_axes=row_axes_of(self.model), gather=alone, **own)
        (stage,) = self.plan.stages
        with tf.device(self.device_names[0]), use(context):
            values = [_rows(leaf, first, rows) for leaf in self.plan.inputs(inputs)]
            outputs = stage(values, training=training)
            return outputs, total(context.penalties) * (rows / num_rows)

    def _sum_over_micro_batches(
        self, num_rows: int, work: Callable[[Any, int], tuple[list[Any], Any]]
    ) -> tuple[Any, Any]:
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

        def add(first: Tensor, rows: int, sums: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            outputs, summands = work(first, rows)
            summands = [value for value in tf.nest.flatten(summands) if value is not None]
            return outputs, [total + value for total, value in zip(sums, summands, strict=True)]

        def body(number: Tensor, arrays: list[tf.TensorArray], sums: list[Tensor]) -> tuple[Any, ...]:
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


def _after(work: list[Tensor], number: Tensor) -> Tensor:
    """Returns a number that is ready once the work is done, so that what needs it starts no sooner."""
    with tf.control_dependencies(work):
        return tf.identity(number)


def _rows(leaf: Tensor | None, first: Tensor, rows: int) -> Tensor | None:
    """Returns some rows of a tensor, with a known shape."""
    if leaf is None:
        return None
    return tf.slice(leaf, [first] + [0] * (len(leaf.shape) - 1), [rows, *leaf.shape[1:]])
