"""TensorFlow: makes the passes of the stages of a pipeline, in the order of its schedule."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from kerasdp.backends.base import Structure, Tensor, Work
from kerasdp.backends.tensorflow.gradients import dense
from kerasdp.portability.replica_context import ReplicaContext, alone, use

if TYPE_CHECKING:
    import keras

    from kerasdp.pipeline.plan import MicroBatches, Plan


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
        self._call, self._add = _called(self.compute), _called(_sums)

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

    def compute(
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


class PipelineStep:
    """Makes the passes of a step, and passes activations and gradients between the stages.

    Each pass of a stage waits for the one before it in the stage's order: TensorFlow would otherwise begin whatever has
    its inputs, all forward passes first, and keep all that they leave in memory.

    Args:
        programs: of the stages.
        micro_batches: of the batch.
        inputs: of the first stage, for the global batch.
        training: as for a Keras layer.
        timeline: takes the work that is done; None: it is not watched.

    Attributes:
        outputs: of the last stage, by micro-batch.
        sums: gradients of each stage's weights; None of a stage that has made no backward pass.
        penalties: of activities, scalar tensors, each by its share of the global batch.
    """

    def __init__(
        self,
        programs: list[StageProgram],
        micro_batches: "MicroBatches",
        inputs: list[Tensor],
        *,
        training: bool,
        timeline: list[Work] | None = None,
    ):
        self._programs, self._micro_batches, self._inputs, self._training = programs, micro_batches, inputs, training
        self._timeline, self._begun = timeline, dict[tuple[int, str, int], float]()
        # The seeds of random layers, as they are in the whole batch: each micro-batch begins with these.
        self._seeds = [[tf.identity(seed.value) for seed in program.seeds] if training else [] for program in programs]
        self._made: list[dict[int, ForwardPass]] = [{} for _ in programs]
        # Activations for the next stage, and gradients for the one before.
        self._given: list[dict[int, list[Tensor]]] = [{} for _ in programs]
        self._passed_on: list[dict[int, list[Tensor | None]]] = [{} for _ in programs]
        # What each stage has made last.
        self._last: list[list[Tensor]] = [[] for _ in programs]
        self.outputs: list[list[Tensor]] = []
        self.sums: list[list[Tensor | None] | None] = [None] * len(programs)
        self.penalties: list[Tensor] = []

    def run(
        self,
        orders: list[list[tuple[str, int]]],
        gradients_of: Callable[[int], list[Tensor | None]] = lambda number: [],
        scale: Tensor = 1.0,
    ) -> None:
        """Makes the passes.

        Args:
            orders: what each stage does, see `kerasdp.pipeline.plan.actions`.
            gradients_of: returns the gradients of the last stage's outputs for a micro-batch, once `outputs` has them.
            scale: of these gradients.
        """
        for stage, kind, number in _in_turns(orders):
            program = self._programs[stage]
            with tf.device(program.device_name):
                if kind == "forward":
                    self._forward(stage, number)
                else:
                    is_last = stage == len(self._programs) - 1
                    gradients = gradients_of(number) if is_last else self._passed_on[stage].pop(number)
                    self._backward(stage, number, gradients, scale)

    def _forward(self, stage: int, number: int) -> None:
        program, rows = self._programs[stage], self._micro_batches.rows(number)
        values = self._given[stage - 1].pop(number) if stage else [leaf[rows] for leaf in self._inputs]
        with tf.control_dependencies(self._last[stage]):
            values = self._marked(values, (stage, "forward", number), is_begin=True)
            made = program.forward(values, rows, self._micro_batches.num_rows, self._seeds[stage], self._training)
            outputs = self._marked(made.outputs, (stage, "forward", number), is_begin=False)
        self._made[stage][number], self._last[stage] = made, outputs
        share = self._micro_batches.share_of_rows(number)
        self.penalties += [penalty * share for penalty in made.penalties]
        if stage == len(self._programs) - 1:
            self.outputs.append(outputs)
        else:
            self._given[stage][number] = outputs

    def _backward(self, stage: int, number: int, gradients: list[Tensor | None], scale: Tensor) -> None:
        program, made = self._programs[stage], self._made[stage].pop(number)
        with tf.control_dependencies(self._last[stage]):
            gradients = self._marked(gradients, (stage, "backward", number), is_begin=True)
            of_penalty = scale * self._micro_batches.share_of_rows(number)
            of_inputs, of_weights = program.backward(made, gradients, of_penalty)
            found = self._marked([*of_inputs, *of_weights], (stage, "backward", number), is_begin=False)
        of_inputs, of_weights = found[: len(of_inputs)], found[len(of_inputs) :]
        if stage:
            self._passed_on[stage - 1][number] = of_inputs
        sums = self.sums[stage] = program.add(self.sums[stage], of_weights)
        self._last[stage] = [leaf for leaf in (*of_inputs, *sums) if leaf is not None] or self._last[stage]

    def _marked(self, values: list[Any], key: tuple[int, str, int], *, is_begin: bool) -> list[Any]:
        """Returns the tensors (and None); records in the timeline when they are ready."""
        if self._timeline is None:
            return values

        def note(*arrays: Any) -> Any:
            now = time.perf_counter()
            if is_begin:
                self._begun[key] = now
            elif self._timeline is not None:
                self._timeline.append((*key, self._begun.pop(key, now), now))
            return arrays

        tensors = [leaf for leaf in values if leaf is not None]
        # Stateless to TensorFlow, which would otherwise run all such functions one after the other.
        marked = tf.numpy_function(note, tensors, [leaf.dtype for leaf in tensors], stateful=False)
        for leaf, own in zip(marked, tensors):
            leaf.set_shape(own.shape)
        left = iter(marked)
        return [None if leaf is None else next(left) for leaf in values]


def _in_turns(orders: list[list[tuple[str, int]]]) -> Iterator[tuple[int, str, int]]:
    """Returns stage, kind and micro-batch of all passes of all stages, each after those that it needs."""
    left, made = [deque(order) for order in orders], set()
    while any(left):
        for stage, queue in enumerate(left):
            if not queue:
                continue
            kind, number = queue[0]
            before = stage - 1 if kind == "forward" else stage + 1
            if 0 <= before < len(left) and (before, kind, number) not in made:
                continue
            made.add((stage, *queue.popleft()))
            yield stage, kind, number
