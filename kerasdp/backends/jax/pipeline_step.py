"""JAX: runs one step of a pipeline, with one thread per stage."""

import contextlib
import itertools
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any

import jax
import numpy as np

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.jax.pipeline_stage import Part


class Step:
    """Runs the stages of one step in threads, and passes activations and gradients between them.

    Args:
        pipeline: of `pipeline_engine`.
        state: what Keras hands to a step.
        batch: the global batch.
        micro_batches: those of the plan, for it.
        is_whole: whether the loss is taken of all outputs at once.
    """

    def __init__(self, pipeline: Any, state: Any, batch: DeviceBatch, micro_batches: Any, *, is_whole: bool):
        self.pipeline, self.batch, self.micro_batches = pipeline, batch, micro_batches
        trainable, non_trainable, slots, _ = state
        parts = pipeline.parts
        self.values = [
            [
                part.trainable.of(trainable),
                part.non_trainable.of(non_trainable),
                # Some, as the step counter, belong to all stages.
                jax.device_put(part.slots.of(slots), part.whole) if slots else [],
            ]
            for part in parts
        ]
        # The seeds of random layers, as they are in the whole batch: each micro-batch begins with these.
        self.seeds = [[values[1][place] for place in part.seeds] for part, values in zip(parts, self.values)]
        self.is_whole = is_whole
        self.activations, self.gradients = (
            [[Future[Any]() for _ in range(len(micro_batches))] for _ in range(len(parts) + 1)] for _ in range(2)
        )
        self.pullbacks: list[dict[int, Any]] = [{} for _ in parts]
        self.penalties_of: list[list[Any]] = [[] for _ in parts]
        self.sums: list[Any] = [None] * len(parts)
        self.totals: list[Future[Any]] = [Future() for _ in parts]
        self.updated: list[Any] = [None] * len(parts)
        if not is_whole:
            self.shares = micro_batches.shares(pipeline.model, is_weighted=batch.sample_weight is not None)
        inputs = pipeline.plan.inputs(batch.inputs)
        for number, future in enumerate(self.activations[0]):
            future.set_result([leaf[micro_batches.rows(number)] for leaf in inputs])

    def run(self, orders: list[list[tuple[str, int]]]) -> None:
        """Runs each stage in a thread of its own; raises what one of them raises."""
        running = [self.pipeline.threads.submit(self._work, part, order) for part, order in zip(self._parts, orders)]
        errors = [error for error in (future.exception() for future in running) if error is not None]
        for error in errors:
            if not isinstance(error, (_OtherFailed, InvalidStateError)):  # the latter follows from the former
                raise error

    @property
    def _parts(self) -> list[Part]:
        return self.pipeline.parts

    def _work(self, part: Part, order: list[tuple[str, int]]) -> None:
        try:
            for kind, number in order:
                begin, made = getattr(self, f"_{kind}")(part, number)
                if self.pipeline.timeline is not None and kind != "update":
                    jax.block_until_ready(made)
                    self.pipeline.timeline.append((part.number, kind, number, begin, time.perf_counter()))
        except BaseException:
            for future in itertools.chain(*self.activations, *self.gradients, self.totals):
                if not future.done():
                    with contextlib.suppress(Exception):
                        future.set_exception(_OtherFailed())
            raise

    def _received(self, part: Part, futures: list[Future[Any]], number: int) -> tuple[Any, float]:
        values = futures[number].result()
        values = jax.device_put(values, part.sharding_for(self.micro_batches.num_rows_of(number)))
        futures[number] = Future()  # frees the memory
        if self.pipeline.timeline is not None:
            jax.block_until_ready(values)
        return values, time.perf_counter()

    def _forward(self, part: Part, number: int) -> tuple[float, Any]:
        inputs, begin = self._received(part, self.activations[part.number], number)
        values = self.values[part.number]
        for place, seed in zip(part.seeds, self.seeds[part.number]):
            values[1][place] = seed
        outputs, penalty, pullback, values[1] = part.forward(
            values[0], values[1], inputs, np.int32(self.micro_batches.rows(number).start)
        )
        values[1] = list(values[1])
        self.pullbacks[part.number][number] = pullback
        self.penalties_of[part.number].append((self.micro_batches.share_of_rows(number), penalty))
        self.activations[part.number + 1][number].set_result(outputs)
        if part.is_last:
            self._measure(part, number)
        return begin, outputs

    def _accumulate(self, part: Part, number: int) -> tuple[float, Any]:
        """Runs forward, loss and backward in one program, which keeps less in memory than two."""
        inputs, begin = self._received(part, self.activations[part.number], number)
        micro_batches, values = self.micro_batches, self.values[part.number]
        rows, share = micro_batches.rows(number), np.float32(micro_batches.share_of_rows(number))
        for place, seed in zip(part.seeds, self.seeds[part.number]):
            values[1][place] = seed
        if self.sums[part.number] is None:
            self.sums[part.number] = part.zeros(values[0])
        outputs, penalty, values[1], self.sums[part.number] = part.accumulate(
            values[0], values[1], inputs, *part.cut((self.batch.targets, self.batch.sample_weight), rows),
            np.int32(rows.start), (np.float32(self.shares[number]), share), part.loss_scale(values[2]),
            self.sums[part.number],
        )  # fmt: skip
        values[1] = list(values[1])
        self.penalties_of[part.number].append((share, penalty))
        self.activations[part.number + 1][number].set_result(outputs)
        return begin, self.sums[part.number]

    def _infer(self, part: Part, number: int) -> tuple[float, Any]:
        inputs, begin = self._received(part, self.activations[part.number], number)
        trainable, non_trainable, _ = self.values[part.number]
        outputs, penalty = part.infer(trainable, non_trainable, inputs)
        self.penalties_of[part.number].append((self.micro_batches.share_of_rows(number), penalty))
        self.activations[part.number + 1][number].set_result(outputs)
        return begin, outputs

    def _measure(self, part: Part, number: int) -> None:
        """Computes the gradient of the loss: of all micro-batches once the last one is there, or of each one."""
        targets, weights = self.batch.targets, self.batch.sample_weight
        scale = part.loss_scale(self.values[part.number][2])
        if not self.is_whole:
            rows = self.micro_batches.rows(number)
            targets, weights = part.cut((targets, weights), rows)
            outputs = [self.activations[-1][number].result()]
            (gradients,) = part.gradients(outputs, targets, weights, scale * self.shares[number])
            self.gradients[part.number][number].set_result(gradients)
        elif number == len(self.micro_batches) - 1:
            gradients = part.gradients(self._all_outputs(), targets, weights, scale)
            for future, gradient in zip(self.gradients[part.number], gradients):
                future.set_result(gradient)

    def _backward(self, part: Part, number: int) -> tuple[float, Any]:
        gradients, begin = self._received(part, self.gradients[part.number], number)
        pullback = self.pullbacks[part.number].pop(number)
        share = np.float32(self.micro_batches.share_of_rows(number))
        share = share * part.loss_scale(self.values[part.number][2])
        self.sums[part.number], passed_on = part.backward(pullback, gradients, share, self.sums[part.number])
        if not part.is_first:
            self.gradients[part.number - 1][number].set_result(passed_on)
        return begin, (passed_on, self.sums[part.number])

    def _update(self, part: Part, _: int) -> tuple[float, Any]:
        trainable, non_trainable, slots = self.values[part.number]
        gradients, penalty, totals = part.finish(trainable, self.sums[part.number], part.loss_scale(slots))
        self.totals[part.number].set_result(totals)
        totals = [jax.device_put(future.result(), part.whole) for future in self.totals]
        trainable, slots = part.update(trainable, slots, gradients, totals)
        penalties = [penalty, *(share * value for share, value in self.penalties_of[part.number])]
        self.updated[part.number] = trainable, non_trainable, slots, sum(penalties)
        return 0.0, None

    def _all_outputs(self) -> list[Any]:
        return [future.result() for future in self.activations[-1]]

    def outputs(self) -> list[Any]:
        """Returns the outputs of the global batch."""
        return self._parts[-1].joined(self._all_outputs())

    def penalties(self) -> list[Any]:
        """Returns the activity penalties of all micro-batches."""
        return [share * value for values in self.penalties_of for share, value in values]


class _OtherFailed(Exception):
    """Another stage's thread has failed."""
