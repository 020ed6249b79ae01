"""JAX: trains a model in stages, each with a thread and one or more devices."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kerasdp.backends.base import DeviceBatch, Work
from kerasdp.backends.jax.devices import DeviceMesh
from kerasdp.backends.jax.pipeline_stage import StageProgram
from kerasdp.backends.jax.pipeline_step import PipelineStep
from kerasdp.config import Config
from kerasdp.runtime.ranks import Processes

if TYPE_CHECKING:
    import keras


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
        # Of a stage with weights to train: its optimizer updates what belongs to all stages, as the step counter.
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

    def _passes(self, state: Any, batch: DeviceBatch, end: list[tuple[str, int]]) -> PipelineStep:
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

    def _infer(self, state: Any, batch: DeviceBatch) -> PipelineStep:
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
