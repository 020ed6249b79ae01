"""TensorFlow: trains models in stages."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, SingleProcess, StagedModels, StepFunctions, Strategy, Structure, Trained
from kerasdp.backends.tensorflow.devices import (
    device_names,
    peak_memory_by_device,
    put_on_device,
    require_deterministic,
)
from kerasdp.backends.tensorflow.gradient_accumulation import Accumulation
from kerasdp.backends.tensorflow.pipeline_engine import Pipeline
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
        """Call before Keras is imported."""
        self.config, self.num_devices, self.num_replicas = config, devices.count, 1
        self.processes = SingleProcess()
        self.device_names = device_names(devices)
        self.must_be_deterministic = config.deterministic and devices.is_accelerator
        self.stages: StagedModels[Pipeline] = StagedModels(config, self._make_engine, self.shard_batch)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are made: in host memory, which may hold more than a device does."""
        with tf.device("CPU:0"):
            yield

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings the inputs to the first stage's device, all else to the last one's."""
        inputs = put_on_device(batch.inputs, self.device_names[0])
        rest = (batch.targets, batch.sample_weight, batch.indices)
        return DeviceBatch(inputs, *put_on_device(rest, self.device_names[-1]))

    def _make_engine(self, model: "keras.Model") -> Pipeline:
        """Makes an engine for a model."""
        kind = Accumulation if self.config.accumulate > 1 else Pipeline
        return kind(model, self.config, self.device_names, self.processes)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that work on all stages."""
        pipeline = self.stages.engine_of(model)
        pipeline.build_programs()
        train_step, watched_step, test_step, predict_step = (
            self._graph(model, step)
            for step in (pipeline.train_step, pipeline.train_step, pipeline.test_step, pipeline.predict_step)
        )

        def train(batch: DeviceBatch, _: Detail) -> Trained:
            loss, logs = (train_step if pipeline.timeline is None else watched_step)(*batch)
            return Trained(loss, None, logs, {})

        return StepFunctions(
            train=train, test=lambda batch: test_step(*batch), predict=lambda batch: predict_step(*batch)
        )

    def _graph(self, model: "keras.Model", step: Callable[..., Any]) -> Callable[..., Any]:
        if model.run_eagerly:
            return step
        # XLA (2.21) takes no variables of several devices, whatever `jit_compile` says.
        compiled = (model.jit_compile or None) if self.config.accumulate > 1 else False
        graph = tf.function(tf.autograph.experimental.do_not_convert(step), jit_compile=compiled)
        if not self.must_be_deterministic:
            return graph
        known: set[tuple[Any, ...]] = set()

        def checked(*data: Structure) -> Any:
            key = tuple((leaf.shape, leaf.dtype) for leaf in tf.nest.flatten(data) if leaf is not None)
            if key not in known:
                known.add(key)
                require_deterministic(graph.get_concrete_function(*data).graph)
            return graph(*data)

        return checked

    def diverged_variables(self, model: "keras.Model") -> list[str]:
        """Returns none: each weight exists once."""
        return []

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device has used; nothing if they share one process."""
        return peak_memory_by_device(self.device_names)
