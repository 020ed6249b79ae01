"""TensorFlow: trains models in stages, all in one graph."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, SingleProcess, StagedModels, StepFunctions
from kerasdp.backends.steps import require_device_batch
from kerasdp.backends.tensorflow import data_parallel
from kerasdp.backends.tensorflow.devices import device_names
from kerasdp.backends.tensorflow.gradient_accumulation import Accumulation
from kerasdp.backends.tensorflow.pipeline_engine import Pipeline
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
        """Call before Keras is imported."""
        self.processes = SingleProcess()
        self.stages = StagedModels(config, self._make_engine, self.shard_batch)
        self.config, self.num_devices, self.num_replicas = config, devices.count, 1
        self.names = device_names(devices)
        self.mirrored = tf.distribute.get_strategy()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are made: in host memory, which may hold more than a device does."""
        with tf.device("CPU:0"):
            yield

    def shard_batch(self, batch: Any) -> DeviceBatch:
        """Brings the inputs to the first stage's device, all else to the last one's."""
        import keras

        def put(leaf: Any, name: str) -> Any:
            with tf.device(name):
                return None if leaf is None else tf.convert_to_tensor(leaf)

        inputs = keras.tree.map_structure(lambda leaf: put(leaf, self.names[0]), batch.inputs)
        rest = (batch.targets, batch.sample_weight, batch.indices)
        return DeviceBatch(inputs, *keras.tree.map_structure(lambda leaf: put(leaf, self.names[-1]), rest))

    def _make_engine(self, model: Any) -> Pipeline:
        """Makes an engine for a model."""
        kind = Accumulation if self.config.accumulate > 1 else Pipeline
        return kind(model, self.config, self.names, self.processes)

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions for Keras' `fit` that work on all stages."""
        pipeline = self.stages.engine_of(model)
        train_step, watched_step, test_step, predict_step = (
            self._graph(model, step)
            for step in (pipeline.train_step, pipeline.train_step, pipeline.test_step, pipeline.predict_step)
        )

        def train_function(iterator: Iterator[Any]) -> Any:
            if (batch := next(iterator)) is SKIPPED:
                return run_state.skipped_logs
            data = require_device_batch(batch)
            loss, logs = (train_step if pipeline.timeline is None else watched_step)(*data)
            run_state.after_step(loss, data.indices, {})
            return logs

        return StepFunctions(
            train=train_function,
            test=lambda iterator: test_step(*require_device_batch(next(iterator))),
            predict=lambda data: predict_step(*require_device_batch(data[0])),
        )

    def _graph(self, model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
        if model.run_eagerly:
            return step
        # XLA (2.21) takes no variables of several devices, whatever `jit_compile` says.
        compiled = (model.jit_compile or None) if self.config.accumulate > 1 else False
        return tf.function(tf.autograph.experimental.do_not_convert(step), jit_compile=compiled)

    @contextlib.contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Returns the context of Keras' `fit`, `evaluate` and `predict`."""
        yield

    def variables_outside_scope(self, model: Any) -> list[str]:
        """Returns none: variables may be made anywhere."""
        return []

    def diverged_variables(self, model: Any) -> list[str]:
        """Returns none: each weight exists once."""
        return []
