"""TensorFlow: makes all passes of one step of a pipeline, in the order of its schedule."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import Tensor, Work
from kerasdp.backends.tensorflow.pipeline_stage import ForwardPass, StageProgram

if TYPE_CHECKING:
    from kerasdp.pipeline.plan import MicroBatches


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
