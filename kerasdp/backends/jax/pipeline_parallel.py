"""JAX: trains models in stages, in one process: each stage has a thread and one or more devices."""

import contextlib
import itertools
import time
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kerasdp.backends.base import DeviceBatch, PipelineEngine, StagedModels, StepFunctions, Trained
from kerasdp.backends.jax.devices import JaxStrategy
from kerasdp.backends.jax.pipeline_stage import StageProgram
from kerasdp.backends.jax.train_step import ModelState
from kerasdp.config import Config
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.ranks import Processes
from kerasdp.runtime.run_state import Detail, RunState

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch
    from kerasdp.pipeline.plan import MicroBatches


class PipelineParallel(JaxStrategy):
    """The stages of a run. See `kerasdp.backends.base.Strategy`."""

    num_replicas = 1
    splits_batches = True

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self.stages: StagedModels[Pipeline] = StagedModels(
            config, lambda model: Pipeline(model, config, self.devices, self.processes), self.shard_batch
        )

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are made: in host memory, which may hold more than a device does."""
        return jax.default_device(jax.devices("cpu")[0])

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Leaves the batch where it is: each stage takes what it needs."""
        return DeviceBatch(batch.inputs, batch.targets, batch.sample_weight, batch.indices)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that work on all stages."""
        pipeline = self.stages.engine_of(model)
        state = pipeline.state()

        def train(batch: DeviceBatch, _: Detail) -> Trained:
            loss, logs = pipeline.train_step(state, batch)
            return Trained(loss, None, logs, {})

        return StepFunctions(
            train=train,
            test=lambda batch: pipeline.test_step(state, batch),
            predict=lambda batch: pipeline.predict_step(state, batch),
        )


class Pipeline(PipelineEngine):
    """Trains a model on its stages' devices."""

    def __init__(self, model: "keras.Model", config: Config, devices: list[jax.Device], processes: Processes):
        from kerasdp.pipeline.plan import make_plan

        plan = make_plan(model, config, len(devices), processes.broadcast_from_rank0)
        super().__init__(model, plan, processes)
        num_stages = len(plan.stages)
        # One thread per stage: on the CPU, JAX (0.10.2) executes one after the other what one thread asks for.
        self.threads = ThreadPoolExecutor(num_stages)
        self.programs = [
            StageProgram(model, plan, number, list(of_stage))
            for number, of_stage in enumerate(np.array(devices).reshape(num_stages, -1))
        ]
        # The first stage with weights to train: its optimizer updates what belongs to all stages, as the step counter.
        self.sharing_program = next((program for program in self.programs if program.trainable), self.programs[0])

    def state(self) -> ModelState:
        """Returns what a step reads and changes, on the devices of the stages.

        In this order: the trainable variables, others and slots of each stage; what the optimizer has for all weights
        together; the metrics.
        """
        variables, shardings = [], []
        for program in self.programs:
            variables += [program.trainable, program.non_trainable, program.slots]
            shardings += [program.replicated] * 3
        variables += [self.sharing_program.shared, self.model.metrics_variables]
        return ModelState(variables, [*shardings, self.sharing_program.replicated, self.programs[-1].replicated])

    def train_step(self, state: ModelState, batch: DeviceBatch) -> tuple[Any, Any]:
        """Trains on the global batch; returns its loss and Keras' logs."""
        values = state.take()
        step = self._passes(values, batch, [("update", 0)])
        penalties = [updated[-1] for updated in step.updated]
        loss, logs, metrics = self.programs[-1].measure(step.outputs(), penalties, batch, values[-1])
        new = []
        for program, (trainable, non_trainable, slots, _) in zip(self.programs, step.updated):
            num_own = len(program.slots)
            new += [trainable, non_trainable, slots[:num_own]]
            if program is self.sharing_program:
                shared = slots[num_own:]
        state.give((*new, shared, metrics))
        return loss, logs

    def seconds_without_update(self, batch: DeviceBatch) -> float:
        """See `kerasdp.backends.base.PipelineEngine`."""
        state = self.state()
        values = state.take()
        state.give(values)
        begin = time.perf_counter()
        jax.block_until_ready(self._passes(values, batch, []).sums)
        return time.perf_counter() - begin

    def _passes(self, values: Any, batch: DeviceBatch, end: list[tuple[str, int]]) -> "PipelineStep":
        from kerasdp.pipeline.plan import actions

        micro_batches = self.plan.micro_batches(len(batch.indices))
        schedule = self.plan.schedule_for(len(micro_batches))
        step = PipelineStep(self, values, batch, micro_batches, is_whole=schedule == "gpipe")
        orders = [
            actions(schedule, program.number, len(self.programs), len(micro_batches)) for program in self.programs
        ]
        if self.plan.is_whole_model:
            orders = [[("accumulate", number) for number in range(len(micro_batches))]]
        step.run([[*order, *end] for order in orders])
        return step

    def test_step(self, state: ModelState, batch: DeviceBatch) -> Any:
        """Evaluates the global batch; returns Keras' logs."""
        values = state.take()
        step = self._infer(values, batch)
        penalties = [program.penalty(of_stage[0]) for program, of_stage in zip(self.programs, step.values)]
        _, logs, metrics = self.programs[-1].measure(step.outputs(), penalties + step.penalties(), batch, values[-1])
        state.give((*values[:-1], metrics))
        return logs

    def predict_step(self, state: ModelState, batch: DeviceBatch) -> Any:
        """Computes the outputs of the global batch."""
        values = state.take()
        outputs = self.plan.outputs(self._infer(values, batch).outputs())
        state.give(values)  # which stay where they were brought
        return outputs

    def _infer(self, values: Any, batch: DeviceBatch) -> "PipelineStep":
        micro_batches = self.plan.micro_batches(len(batch.indices))
        step = PipelineStep(self, values, batch, micro_batches, is_whole=True)
        step.run([[("infer", number) for number in range(len(micro_batches))] for _ in self.programs])
        return step


class PipelineStep:
    """Runs the stages of one step in threads, and passes activations and gradients between them.

    Args:
        pipeline: which makes the step.
        values: see `Pipeline.state`.
        batch: the global batch.
        micro_batches: those of the plan, for it.
        is_whole: whether the loss is taken of all outputs at once.
    """

    def __init__(
        self, pipeline: Any, values: Any, batch: DeviceBatch, micro_batches: "MicroBatches", *, is_whole: bool
    ):
        self.pipeline, self.batch, self.micro_batches = pipeline, batch, micro_batches
        programs, (*of_stages, shared, _) = pipeline.programs, values
        of_each = [of_stages[first : first + 3] for first in range(0, len(of_stages), 3)]
        self.values = [
            [trainable, list(non_trainable), [*slots, *jax.device_put(shared, program.replicated)]]
            for program, (trainable, non_trainable, slots) in zip(programs, of_each)
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

    def _share(self, program: StageProgram, number: int) -> Any:
        return program.constant(self.micro_batches.share_of_rows(number))

    def _begin_with_seeds(self, program: StageProgram) -> list[Any]:
        """Returns the values of a stage; its random layers draw what the rows draw in the whole batch."""
        values = self.values[program.number]
        for index, seed in zip(program.seeds, self.seeds[program.number]):
            values[1][index] = seed
        return values

    def _give(self, program: StageProgram, number: int, outputs: list[Any], penalty: Any) -> None:
        """Passes outputs on, and keeps the share of the penalty."""
        self.penalties_of[program.number].append(program.times(self._share(program, number), penalty))
        self.activations[program.number + 1][number].set_result(outputs)

    def _forward(self, program: StageProgram, number: int) -> tuple[float, Any]:
        inputs, begin = self._received(program, self.activations[program.number], number)
        values = self._begin_with_seeds(program)
        outputs, penalty, self.pullbacks[program.number][number], new = program.forward(
            values[0], values[1], inputs, program.constant(np.int32(self.micro_batches.rows(number).start))
        )
        values[1] = list(new)
        self._give(program, number, outputs, penalty)
        if program.is_last:
            self._measure(program, number)
        return begin, outputs

    def _accumulate(self, program: StageProgram, number: int) -> tuple[float, Any]:
        """Runs forward, loss and backward in one program, which keeps less in memory than two."""
        inputs, begin = self._received(program, self.activations[program.number], number)
        rows, values = self.micro_batches.rows(number), self._begin_with_seeds(program)
        if self.sums[program.number] is None:
            self.sums[program.number] = program.zeros(values[0])
        outputs, penalty, new, self.sums[program.number] = program.accumulate(
            values[0], values[1], inputs, *program.put((self.batch.targets, self.batch.sample_weight), rows),
            program.constant(np.int32(rows.start)),
            (program.constant(self.shares[number]), self._share(program, number)),
            program.loss_scale(values[2]), self.sums[program.number],
        )  # fmt: skip
        values[1] = list(new)
        self._give(program, number, outputs, penalty)
        return begin, self.sums[program.number]

    def _infer(self, program: StageProgram, number: int) -> tuple[float, Any]:
        inputs, begin = self._received(program, self.activations[program.number], number)
        trainable, non_trainable, _ = self.values[program.number]
        outputs, penalty = program.infer(trainable, non_trainable, inputs)
        self._give(program, number, outputs, penalty)
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
        scale = program.loss_scale(self.values[program.number][2])
        self.sums[program.number], passed_on = program.backward(
            pullback, gradients, self.sums[program.number], self._share(program, number), scale
        )
        if not program.is_first:
            self.gradients[program.number - 1][number].set_result(passed_on)
        return begin, (passed_on, self.sums[program.number])

    def _update(self, program: StageProgram, _: int) -> tuple[float, Any]:
        trainable, non_trainable, slots = self.values[program.number]
        gradients, penalty, totals = program.finish(trainable, self.sums[program.number], program.loss_scale(slots))
        self.totals[program.number].set_result(totals)
        totals = [jax.device_put(future.result(), program.replicated) for future in self.totals]
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
