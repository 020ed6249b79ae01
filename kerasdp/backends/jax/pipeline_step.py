"""JAX: runs one step of a pipeline, with one thread per stage."""

import contextlib
import itertools
import time
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.jax.pipeline_stage import StageProgram

if TYPE_CHECKING:
    from kerasdp.pipeline.plan import MicroBatches


class PipelineStep:
    """Runs the stages of one step in threads, and passes activations and gradients between them.

    Args:
        pipeline: of `pipeline_engine`.
        state: what Keras hands to a step.
        batch: the global batch.
        micro_batches: those of the plan, for it.
        is_whole: whether the loss is taken of all outputs at once.
    """

    def __init__(self, pipeline: Any, state: Any, batch: DeviceBatch, micro_batches: "MicroBatches", *, is_whole: bool):
        self.pipeline, self.batch, self.micro_batches = pipeline, batch, micro_batches
        trainable, non_trainable, slots, _ = state
        programs = pipeline.programs
        self.values = [
            [
                program.trainable.select(trainable),
                program.non_trainable.select(non_trainable),
                # Some, as the step counter, belong to all stages.
                jax.device_put(program.slots.select(slots), program.copied) if slots else [],
            ]
            for program in programs
        ]
        # The seeds of random layers, as they are in the whole batch: each micro-batch begins with these.
        self.seeds = [[values[1][index] for index in program.seeds] for program, values in zip(programs, self.values)]
        self.is_whole = is_whole
        self.activations, self.gradients = (
            [[Future[Any]() for _ in range(len(micro_batches))] for _ in range(len(programs) + 1)] for _ in range(2)
        )
        self.pullbacks: list[dict[int, Any]] = [{} for _ in programs]
        self.penalties_of: list[list[Any]] = [[] for _ in programs]
        self.sums: list[Any] = [None] * len(programs)
        self.totals: list[Future[Any]] = [Future() for _ in programs]
        self.updated: list[Any] = [None] * len(programs)
        if not is_whole:
            self.shares = micro_batches.shares(pipeline.model, is_weighted=batch.sample_weight is not None)
        inputs = pipeline.plan.inputs(batch.inputs)
        for number, future in enumerate(self.activations[0]):
            future.set_result([leaf[micro_batches.rows(number)] for leaf in inputs])

    def run(self, orders: list[list[tuple[str, int]]]) -> None:
        """Runs each stage in a thread of its own; raises what one of them raises."""
        running = [
            self.pipeline.threads.submit(self._work, program, order)
            for program, order in zip(self.pipeline.programs, orders)
        ]
        errors = [error for error in (future.exception() for future in running) if error is not None]
        for error in errors:
            if not isinstance(error, (_OtherFailed, InvalidStateError)):  # the latter follows from the former
                raise error

    def _work(self, program: StageProgram, order: list[tuple[str, int]]) -> None:
        try:
            for kind, number in order:
                begin, made = getattr(self, f"_{kind}")(program, number)
                if self.pipeline.timeline is not None and kind != "update":
                    jax.block_until_ready(made)
                    self.pipeline.timeline.append((program.number, kind, number, begin, time.perf_counter()))
        except BaseException:
            for future in itertools.chain(*self.activations, *self.gradients, self.totals):
                if not future.done():
                    with contextlib.suppress(Exception):
                        future.set_exception(_OtherFailed())
            raise

    def _received(self, program: StageProgram, futures: list[Future[Any]], number: int) -> tuple[Any, float]:
        values = futures[number].result()
        values = jax.device_put(values, program.sharding_for(self.micro_batches.num_rows_of(number)))
        futures[number] = Future()  # frees the memory
        if self.pipeline.timeline is not None:
            jax.block_until_ready(values)
        return values, time.perf_counter()

    def _forward(self, program: StageProgram, number: int) -> tuple[float, Any]:
        inputs, begin = self._received(program, self.activations[program.number], number)
        values = self.values[program.number]
        for index, seed in zip(program.seeds, self.seeds[program.number]):
            values[1][index] = seed
        outputs, penalty, pullback, values[1] = program.forward(
            values[0], values[1], inputs, program.constant(np.int32(self.micro_batches.rows(number).start))
        )
        values[1] = list(values[1])
        self.pullbacks[program.number][number] = pullback
        share = program.constant(self.micro_batches.share_of_rows(number))
        self.penalties_of[program.number].append(program.times(share, penalty))
        self.activations[program.number + 1][number].set_result(outputs)
        if program.is_last:
            self._measure(program, number)
        return begin, outputs

    def _accumulate(self, program: StageProgram, number: int) -> tuple[float, Any]:
        """Runs forward, loss and backward in one program, which keeps less in memory than two."""
        inputs, begin = self._received(program, self.activations[program.number], number)
        micro_batches, values = self.micro_batches, self.values[program.number]
        rows, share = micro_batches.rows(number), program.constant(micro_batches.share_of_rows(number))
        for index, seed in zip(program.seeds, self.seeds[program.number]):
            values[1][index] = seed
        if self.sums[program.number] is None:
            self.sums[program.number] = program.zeros(values[0])
        outputs, penalty, values[1], self.sums[program.number] = program.accumulate(
            values[0], values[1], inputs, *program.put((self.batch.targets, self.batch.sample_weight), rows),
            program.constant(np.int32(rows.start)), (program.constant(self.shares[number]), share),
            program.loss_scale(values[2]), self.sums[program.number],
        )  # fmt: skip
        values[1] = list(values[1])
        self.penalties_of[program.number].append(program.times(share, penalty))
        self.activations[program.number + 1][number].set_result(outputs)
        return begin, self.sums[program.number]

    def _infer(self, program: StageProgram, number: int) -> tuple[float, Any]:
        inputs, begin = self._received(program, self.activations[program.number], number)
        trainable, non_trainable, _ = self.values[program.number]
        outputs, penalty = program.infer(trainable, non_trainable, inputs)
        share = program.constant(self.micro_batches.share_of_rows(number))
        self.penalties_of[program.number].append(program.times(share, penalty))
        self.activations[program.number + 1][number].set_result(outputs)
        return begin, outputs

    def _measure(self, program: StageProgram, number: int) -> None:
        """Computes the gradient of the loss: of all micro-batches once the last one is there, or of each one."""
        data, scale = (self.batch.targets, self.batch.sample_weight), program.loss_scale(self.values[program.number][2])
        if not self.is_whole:
            outputs, share = [self.activations[-1][number].result()], program.constant(self.shares[number])
            (gradients,) = program.gradients(outputs, *program.put(data, self.micro_batches.rows(number)), share, scale)
            self.gradients[program.number][number].set_result(gradients)
        elif number == len(self.micro_batches) - 1:
            gradients = program.gradients(self._all_outputs(), *program.put(data), program.constant(1.0), scale)
            for future, gradient in zip(self.gradients[program.number], gradients):
                future.set_result(gradient)

    def _backward(self, program: StageProgram, number: int) -> tuple[float, Any]:
        gradients, begin = self._received(program, self.gradients[program.number], number)
        pullback = self.pullbacks[program.number].pop(number)
        share = program.constant(self.micro_batches.share_of_rows(number))
        scale = program.loss_scale(self.values[program.number][2])
        self.sums[program.number], passed_on = program.backward(
            pullback, gradients, self.sums[program.number], share, scale
        )
        if not program.is_first:
            self.gradients[program.number - 1][number].set_result(passed_on)
        return begin, (passed_on, self.sums[program.number])

    def _update(self, program: StageProgram, _: int) -> tuple[float, Any]:
        trainable, non_trainable, slots = self.values[program.number]
        gradients, penalty, totals = program.finish(trainable, self.sums[program.number], program.loss_scale(slots))
        self.totals[program.number].set_result(totals)
        totals = [jax.device_put(future.result(), program.copied) for future in self.totals]
        trainable, slots = program.update(trainable, slots, gradients, totals)
        penalties = program.total([penalty, *self.penalties_of[program.number]])
        self.updated[program.number] = trainable, non_trainable, slots, penalties
        return 0.0, None

    def _all_outputs(self) -> list[Any]:
        return [future.result() for future in self.activations[-1]]

    def outputs(self) -> list[Any]:
        """Returns the outputs of the global batch."""
        return self.pipeline.programs[-1].joined(self._all_outputs())

    def penalties(self) -> list[Any]:
        """Returns the activity penalties of all micro-batches."""
        return [value for values in self.penalties_of for value in values]


class _OtherFailed(Exception):
    """Another stage's thread has failed."""
