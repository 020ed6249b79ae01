"""TensorFlow: makes the passes of one stage of a pipeline."""

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from kerasdp.backends.base import Structure, Tensor
from kerasdp.backends.tensorflow.optimizer_update import dense
from kerasdp.portability.replica_context import ReplicaContext, alone, use

if TYPE_CHECKING:
    import keras

    from kerasdp.pipeline.plan import Plan


class ForwardPass(NamedTuple):
    """What a stage has made of a micro-batch.

    Attributes:
        tape: that has recorded it; None if nothing needs gradients.
        inputs: of the stage.
        outputs: of the stage.
        penalties: of its activities, in one scalar tensor; empty if there are none.
    """

    tape: tf.GradientTape | None
    inputs: list[Tensor]
    outputs: list[Tensor]
    penalties: list[Tensor]


class StageProgram:
    """Makes forward and backward passes of a stage: calls of functions that are built once, not for each micro-batch.

    Attributes:
        device_name: of the stage.
        weights: that are trained.
        seeds: states of random layers.
    """

    def __init__(self, model: "keras.Model", plan: "Plan", number: int, device_name: str):
        """Makes the program of stage `number` of `model`, with which layers are as they are now."""
        from kerasdp.keras_compat.layers import seed_variables

        self.device_name = device_name
        self._model, self._stage = model, plan.stages[number]
        own = self._stage.model
        self.weights, self.seeds = own.trainable_variables, seed_variables(own)
        # Whether a stage before this one has weights that are trained.
        self._passes_back = any(stage.model.trainable_variables for stage in plan.stages[:number])
        self._call, self._add = _called(self._pass), _called(_sums)

    def forward(
        self, inputs: list[Tensor], rows: slice, num_rows: int, seeds: list[Tensor], training: bool
    ) -> ForwardPass:
        """Runs the stage.

        Args:
            inputs: of the stage, for a micro-batch.
            rows: of the global batch that these are.
            num_rows: of the global batch.
            seeds: with which the random layers begin; empty if not `training`.
            training: as for a Keras layer.
        """
        sources = [leaf for leaf in inputs if self._passes_back and leaf.dtype.is_floating]
        tape = tf.GradientTape() if training and (self.weights or sources) else None
        with tape or contextlib.nullcontext():
            if tape is not None:
                tape.watch(sources)
            # Not a constant: TensorFlow (2.21) makes a copy of a function for each constant that it is called with.
            first = tf.compat.v1.placeholder_with_default(rows.start, ())
            outputs, penalties = self._call(first, seeds, inputs, rows.stop - rows.start, num_rows, training)
        return ForwardPass(tape, inputs, outputs, penalties)

    def backward(
        self, made: ForwardPass, gradients: list[Tensor | None], of_penalty: Tensor
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Computes gradients of a forward pass; None where there is none.

        Args:
            made: by `forward`.
            gradients: of its outputs.
            of_penalty: that of its penalties.

        Returns:
            Gradients of its inputs and of `weights`.
        """
        known = [(leaf, gradient) for leaf, gradient in zip(made.outputs, gradients) if gradient is not None]
        known += [(penalty, of_penalty) for penalty in made.penalties]
        places = [place for place, leaf in enumerate(made.inputs) if self._passes_back and leaf.dtype.is_floating]
        of_inputs: list[Tensor | None] = [None] * len(made.inputs)
        if made.tape is None or not known:
            return of_inputs, [None] * len(self.weights)
        outputs, of_outputs = zip(*known)
        sources = [*self.weights, *(made.inputs[place] for place in places)]
        found = dense(made.tape.gradient(outputs, sources, output_gradients=of_outputs))
        for place, gradient in zip(places, found[len(self.weights) :]):
            of_inputs[place] = gradient
        return of_inputs, found[: len(self.weights)]

    def add(self, sums: list[Tensor | None] | None, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Adds the gradients of a micro-batch to the sums of those before; None if there are none yet."""
        if sums is None:
            return gradients
        added = iter(self._add(*([leaf for leaf in leaves if leaf is not None] for leaves in (sums, gradients))))
        return [None if leaf is None else next(added) for leaf in sums]

    def _pass(
        self, first_row: Tensor, seeds: list[Tensor], inputs: list[Tensor], rows: int, num_rows: int, training: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Computes outputs of `rows` rows from `first_row` on of a global batch of `num_rows`, and penalties."""
        from kerasdp.portability.row_search import row_axes_of

        own = {"num_rows": rows, "rows": rows, "first_row": first_row, "total_rows": num_rows}
        context = ReplicaContext(num_replicas=1, row_axes=row_axes_of(self._model), gather=alone, **own)
        with tf.device(self.device_name), use(context):
            for seed, value in zip(self.seeds, seeds):
                seed.assign(value)
            outputs = self._stage(inputs, training=training)
            return outputs, [total(context.penalties)] if context.penalties else []


def total(losses: Iterable[Tensor] = ()) -> Tensor:
    """Adds up losses in the run's precision, as Keras does."""
    import keras

    dtype = keras.config.floatx()
    return sum((tf.cast(loss, dtype) for loss in losses), tf.zeros((), dtype))


def _called(function: Callable[..., Structure]) -> Callable[..., Structure]:
    """Returns a function that stays one call in graphs, however often they call it."""
    # TensorFlow (2.21) otherwise writes out each call where it is made, and optimizes and places all of it.
    in_graphs = tf.function(
        tf.autograph.experimental.do_not_convert(function),
        jit_compile=False,
        experimental_attributes={"_noinline": True},
    )

    def call(*args: Structure) -> Structure:
        return function(*args) if tf.executing_eagerly() else in_graphs(*args)

    return call


def _sums(sums: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
