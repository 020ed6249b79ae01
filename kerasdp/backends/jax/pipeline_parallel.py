"""JAX: trains models in stages, in one process with one thread per stage."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from kerasdp.backends.base import DeviceBatch, SingleProcess, StagedModels, StepFunctions, Strategy, Trained
from kerasdp.backends.jax.devices import differing_variables, peak_memory_by_device, start_jax
from kerasdp.backends.jax.pipeline_engine import Pipeline
from kerasdp.backends.jax.train_step import ModelState, model_states
from kerasdp.config import Config
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.run_state import Detail, RunState

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


class PipelineParallel(Strategy):
    """The stages of a run. See `kerasdp.backends.base.Strategy`."""

    shard = (0, 1)
    splits_batches = True

    def __init__(self, devices: Devices, config: Config):
        self.processes = SingleProcess()
        self.num_devices, self.num_replicas = devices.count, 1
        self.devices = start_jax(devices, config)
        self.stages: StagedModels[Pipeline] = StagedModels(
            config, lambda model: Pipeline(model, config, self.devices, self.processes), self.shard_batch
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are made: in host memory, which may hold more than a device does."""
        with jax.default_device(jax.devices("cpu")[0]):
            yield

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Leaves the batch where it is: each stage takes what it needs."""
        return DeviceBatch(batch.inputs, batch.targets, batch.sample_weight, batch.indices)

    @contextlib.contextmanager
    def running(self, model: "keras.Model") -> Iterator[None]:
        """Brings each stage to its devices, where it stays. The context of `fit`, `evaluate` and `predict`."""
        self.stages.engine_of(model).move_to_stage_devices()
        yield

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that work on all stages."""
        pipeline = self.stages.engine_of(model)
        training, testing, predicting = model_states(model)

        def run(step: Callable[..., tuple[Any, Any]], state: ModelState, batch: DeviceBatch) -> Any:
            outputs, values = step(state.take(), batch)
            state.give(values)
            return outputs

        def train(batch: DeviceBatch, _: Detail) -> Trained:
            loss, logs = run(pipeline.train_step, training, batch)
            return Trained(loss, None, logs, {})

        return StepFunctions(
            train=train,
            test=lambda batch: run(pipeline.test_step, testing, batch),
            predict=lambda batch: run(pipeline.predict_step, predicting, batch),
        )

    def diverged_variables(self, model: "keras.Model") -> list[str]:
        """Returns the paths of variables, seeds included, with a shard that differs between devices that hold it."""
        return differing_variables(model.variables, self.processes)

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device has used; nothing if they share one process."""
        return peak_memory_by_device(self.devices)
