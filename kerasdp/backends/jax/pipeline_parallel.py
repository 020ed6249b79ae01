"""JAX: trains models in stages, in one process with one thread per stage."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from kerasdp.backends.base import DeviceBatch, StagedModels, StepFunctions
from kerasdp.backends.jax import data_parallel
from kerasdp.backends.jax.pipeline_engine import Pipeline
from kerasdp.backends.steps import require_device_batch
from kerasdp.config import Config
from kerasdp.data.sampling import SKIPPED
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.run_state import RunState


class PipelineParallel(data_parallel.DataParallel):
    """The stages of a run. See `kerasdp.backends.base.Strategy`."""

    splits_batches = True
    takes_several_steps = False
    stages: StagedModels[Pipeline]

    def __init__(self, devices: Devices, config: Config):
        super().__init__(devices, config)
        self.stages = StagedModels(config, self._make_engine, self.shard_batch)
        self.config, self.num_devices, self.num_replicas = config, devices.count, 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are made: in host memory, which may hold more than a device does."""
        with jax.default_device(jax.devices("cpu")[0]):
            yield

    def shard_batch(self, batch: Any) -> DeviceBatch:
        """Leaves the batch where it is: each stage takes what it needs."""
        return DeviceBatch(batch.inputs, batch.targets, batch.sample_weight, batch.indices)

    def _make_engine(self, model: Any) -> Pipeline:
        """Makes an engine for a model."""
        return Pipeline(model, self.config, self.devices, self.processes)

    @contextlib.contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Brings each stage to its devices, where it stays. The context of `fit`, `evaluate` and `predict`."""
        self.stages.engine_of(model).move_to_stage_devices()
        yield

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions for Keras' `fit` that work on all stages."""
        pipeline = self.stages.engine_of(model)

        def train_function(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            if (batch := next(iterator)) is SKIPPED:
                return run_state.skipped_logs, state
            data = require_device_batch(batch)
            loss, logs, state = pipeline.train_step(state, data)
            run_state.after_step(loss, data.indices, {})
            return logs, state

        return StepFunctions(
            train=train_function,
            test=lambda state, iterator: pipeline.test_step(state, require_device_batch(next(iterator))),
            predict=lambda state, iterator: pipeline.predict_step(state, require_device_batch(next(iterator))),
        )

    def variables_outside_scope(self, model: Any) -> list[str]:
        """Returns none: variables may be made anywhere."""
        return []
