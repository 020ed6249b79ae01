"""JAX: trains a model in stages, each with a thread and one or more devices, step by step."""

import contextlib
import itertools
import time
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kerasdp.backends.base import DeviceBatch, Work
from kerasdp.backends.jax.devices import DeviceMesh
from kerasdp.backends.jax.pipeline_stage import StageProgram
from kerasdp.config import Config
from kerasdp.runtime.ranks import Processes

if TYPE_CHECKING:
    import keras

    from kerasdp.pipeline.plan import MicroBatches


def _compiled_with(model: "keras.Model") -> tuple[Any, ...]:
    from kerasdp.keras_compat.models import made_by_compile

    return model, getattr(model, "optimizer", None), *made_by_compile(model)


class Pipeline:
    """Trains a model on its stages' devices.

    Attributes:
        plan: how it is cut.
        compiled_with: model, optimizer, loss and metrics.
        timeline: if a list, takes `(stage, "forward" or "backward", micro-batch, begin, end)`, in seconds, of all work,
            which is then waited for.
    """

    def __init__(self, model: "keras.Model", config: Config, devices: list[jax.Device], processes: Processes):
        from kerasdp.pipeline.plan import make_plan

        self.model, self.compiled_with, self.processes = model, _compiled_with(model), processes
        self.plan = make_plan(model, config, len(devices), processes.broadcast_from_rank0)
        num_stages = len(self.plan.stages)
        self.timeline: list[Work] | None = None
        # One thread per stage: on the CPU, JAX (0.10.2) executes one after the other what one thread asks for.
        self.threads = ThreadPoolExecutor(num_stages)
        self.programs = [
            StageProgram(model, self.plan, number, DeviceMesh(list(of_stage)))
            for number, of_stage in enumerate(np.array(devices).reshape(num_stages, -1))
        ]
        # The first stage with weights to train: its optimizer updates what belongs to all stages, as the step counter.
        self.sharing_program = next((program for program in self.programs if program.trainable.variables), None)
        self.last_state: Any = None

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again since."""
        return any(old is not new for old, new in zip(self.compiled_with, _compiled_with(self.model)))

    def move_to_stage_devices(self) -> None:
        """Brings all variables to the devices of their stages."""
        from kerasdp.keras_compat.layers import raw_value, set_raw_value

        for program in self.programs:
            for variables in (program.trainable, program.non_trainable, program.slots, program.metrics):
                for variable in variables.variables:
                    set_raw_value(variable, jax.device_put(raw_value(variable), program.copied))
        self.last_state = None

    def train_step(self, state: Any, batch: DeviceBatch) -> tuple[tuple[Any, Any], Any]:
        """Trains on the global batch; returns its loss with Keras' logs, and the new state."""
        if state is not self.last_state:  # a callback has set variables, which then are on the first device
            state = self._on_stage_devices(state)
        step = self._passes(state, batch, [("update", 0)])
        trainable, non_trainable, slots, metrics = state
        for program, values in zip(self.programs, step.updated):
            trainable = program.trainable.replace(trainable, values[0])
            non_trainable = program.non_trainable.replace(non_trainable, values[1])
            slots = program.slots.replace(slots, values[2], with_shared=program is self.sharing_program)
        penalties = [values[3] for values in step.updated]
        loss, logs, metrics = self.programs[-1].measure(step.outputs(), penalties, batch, metrics)
        self.last_state = trainable, non_trainable, slots, metrics
        return (loss, logs), self.last_state

    def gather_variables(self) -> None:
        """See `kerasdp.backends.base.PipelineEngine`: the one process has them all."""

    def seconds_without_update(self, batch: DeviceBatch) -> float:
        """Returns the seconds of a training step's passes, which leave no trace in any variable."""
        self.move_to_stage_devices()
        model = self.model
        state = [
            [variable.value for variable in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
        ]
        begin = time.perf_counter()
        jax.block_until_ready(self._passes((*state, []), batch, []).sums)
        return time.perf_counter() - begin

    def _passes(self, state: Any, batch: DeviceBatch, end: list[tuple[str, int]]) -> "PipelineStep":
        from kerasdp.pipeline.plan import actions

        micro_batches = self.plan.micro_batches(len(batch.indices))
        schedule = self.plan.schedule_for(len(micro_batches))
        step = PipelineStep(self, state, batch, micro_batches, is_whole=schedule == "gpipe")
        orders = [
            actions(schedule, program.number, len(self.programs), len(micro_batches)) for program in self.programs
        ]
        if self.plan.is_whole_model:
            orders = [[("accumulate", number) for number in range(len(micro_batches))]]
        step.run([[*order, *end] for order in orders])
        return step

    def test_step(self, state: Any, batch: DeviceBatch) -> tuple[Any, Any]:
        """Evaluates the global batch; returns Keras' logs, and the state."""
        if state is not self.last_state:
            state = self._on_stage_devices((*state[:2], [], state[2]))
            state = state[0], state[1], state[3]
        trainable, non_trainable, metrics = state
        step = self._infer((trainable, non_trainable, [], metrics), batch)
        penalties = [program.penalty(program.trainable.select(trainable)) for program in self.programs]
        _, logs, metrics = self.programs[-1].measure(step.outputs(), penalties + step.penalties(), batch, metrics)
        self.last_state = trainable, non_trainable, metrics
        return logs, self.last_state

    def predict_step(self, state: Any, batch: DeviceBatch) -> tuple[Any, Any]:
        """Computes the outputs of the global batch, and the state."""
        if state is not self.last_state:
            self.last_state = state = self._on_stage_devices((*state, [], []))[:2]
        return self.plan.outputs(self._infer((*state, [], []), batch).outputs()), state

    def _infer(self, state: Any, batch: DeviceBatch) -> "PipelineStep":
        micro_batches = self.plan.micro_batches(len(batch.indices))
        step = PipelineStep(self, state, batch, micro_batches, is_whole=True)
        step.run([[("infer", number) for number in range(len(micro_batches))] for _ in self.programs])
        return step

    def _on_stage_devices(self, state: Any) -> Any:
        trainable, non_trainable, slots, metrics = state
        for program in self.programs:
            trainable = program.trainable.replace(
                trainable, jax.device_put(program.trainable.select(trainable), program.copied)
            )
            non_trainable = program.non_trainable.replace(
                non_trainable, jax.device_put(program.non_trainable.select(non_trainable), program.copied)
            )
            if slots:
                slots = program.slots.replace(
                    slots,
                    jax.device_put(program.slots.select(slots), program.copied),
                    with_shared=program is self.sharing_program,
                )
        return trainable, non_trainable, slots, jax.device_put(metrics, self.programs[-1].copied)


class PipelineStep:
    """Runs the stages of one step in threads, and passes activations and gradients between them.

    Args:
        pipeline: which makes the step.
        state: the values of weights, other variables, optimizer and metrics.
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
