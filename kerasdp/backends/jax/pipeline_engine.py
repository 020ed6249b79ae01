"""JAX: trains a model in stages, each with a thread and one or more devices."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kerasdp.backends.base import DeviceBatch
from kerasdp.backends.jax.pipeline_stage import Part
from kerasdp.backends.jax.pipeline_step import Step
from kerasdp.config import Config
from kerasdp.runtime.ranks import Processes


def _made_for(model: Any) -> tuple[Any, ...]:
    from kerasdp.keras_compat import made_by_compile

    return model, getattr(model, "optimizer", None), *made_by_compile(model)


class Pipeline:
    """Trains a model on its stages' devices.

    Attributes:
        plan: how it is cut.
        made_for: model, optimizer, loss and metrics.
        timeline: if a list, takes `(stage, "forward" or "backward", micro-batch, begin, end)`, in seconds, of all work,
            which is then waited for.
    """

    def __init__(self, model: Any, config: Config, devices: list[Any], processes: Processes):
        from kerasdp.pipeline.plan import make_plan

        self.model, self.made_for, self.processes = model, _made_for(model), processes
        self.plan = make_plan(model, config, len(devices), processes.broadcast_from_rank0)
        own = np.array(devices).reshape(len(self.plan.stages), -1)
        self.timeline: list[Any] | None = None
        # One thread per stage: on the CPU, JAX (0.10.2) executes one after the other what one thread asks for.
        self.threads = ThreadPoolExecutor(len(own))
        self.parts = [Part(model, self.plan, number, Mesh(part, ("batch",))) for number, part in enumerate(own)]
        # A stage with weights to train: its optimizer holds what belongs to all stages, as the step counter.
        self.counting = next((part for part in self.parts if part.trainable.variables), None)
        self.last_state: Any = None

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again since."""
        return any(old is not new for old, new in zip(self.made_for, _made_for(self.model)))

    def move_to_stage_devices(self) -> None:
        """Brings all variables to the devices of their stages."""
        from kerasdp.keras_compat import raw_value, set_raw_value

        for part in self.parts:
            for variables in (part.trainable, part.non_trainable, part.slots, part.metrics):
                for variable in variables.variables:
                    set_raw_value(variable, jax.device_put(raw_value(variable), part.whole))
        self.last_state = None

    def train_step(self, state: Any, batch: DeviceBatch) -> tuple[Any, Any, Any]:
        """Trains on the global batch; returns its loss, Keras' logs, and the new state."""
        if state is not self.last_state:  # a callback has set variables, which then are on the first device
            state = self._on_stage_devices(state)
        step = self._passes(state, batch, [("update", 0)])
        trainable, non_trainable, slots, metrics = state
        for part, values in zip(self.parts, step.updated):
            trainable = part.trainable.put(trainable, values[0])
            non_trainable = part.non_trainable.put(non_trainable, values[1])
            slots = part.slots.put(slots, values[2], shared=part is self.counting)
        penalties = [values[3] for values in step.updated]
        loss, logs, metrics = self.parts[-1].measure(step.outputs(), penalties, batch, metrics)
        self.last_state = trainable, non_trainable, slots, metrics
        return loss, logs, self.last_state

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

    def _passes(self, state: Any, batch: DeviceBatch, end: list[tuple[str, int]]) -> Step:
        from kerasdp.pipeline.plan import actions

        micro_batches = self.plan.micro_batches(len(batch.indices))
        schedule = self.plan.schedule_for(len(micro_batches))
        step = Step(self, state, batch, micro_batches, is_whole=schedule == "gpipe")
        orders = [actions(schedule, part.number, len(self.parts), len(micro_batches)) for part in self.parts]
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
        penalties = [part.penalty(part.trainable.of(trainable)) for part in self.parts]
        _, logs, metrics = self.parts[-1].measure(step.outputs(), penalties + step.penalties(), batch, metrics)
        self.last_state = trainable, non_trainable, metrics
        return logs, self.last_state

    def predict_step(self, state: Any, batch: DeviceBatch) -> tuple[Any, Any]:
        """Computes the outputs of the global batch, and the state."""
        if state is not self.last_state:
            self.last_state = state = self._on_stage_devices((*state, [], []))[:2]
        return self.plan.outputs(self._infer((*state, [], []), batch).outputs()), state

    def _infer(self, state: Any, batch: DeviceBatch) -> Step:
        micro_batches = self.plan.micro_batches(len(batch.indices))
        step = Step(self, state, batch, micro_batches, is_whole=True)
        step.run([[("infer", number) for number in range(len(micro_batches))] for _ in self.parts])
        return step

    def _on_stage_devices(self, state: Any) -> Any:
        trainable, non_trainable, slots, metrics = state
        for part in self.parts:
            trainable = part.trainable.put(trainable, jax.device_put(part.trainable.of(trainable), part.whole))
            non_trainable = part.non_trainable.put(
                non_trainable, jax.device_put(part.non_trainable.of(non_trainable), part.whole)
            )
            if slots:
                slots = part.slots.put(
                    slots, jax.device_put(part.slots.of(slots), part.whole), shared=part is self.counting
                )
        return trainable, non_trainable, slots, jax.device_put(metrics, self.parts[-1].whole)
