"""PyTorch: trains models in stages, in one process per device."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kerasdp.backends.base import DeviceBatch, StagedModels, StepFunctions, Strategy, Trained
from kerasdp.backends.torch.devices import (
    begin_thread,
    device_of_process,
    differing_variables,
    join_processes,
    peak_memory_bytes,
    put_batch,
    timeout_of,
)
from kerasdp.backends.torch.pipeline_engine import Pipeline
from kerasdp.backends.torch.waits import numbers_made_on, to_host
from kerasdp.config import Config
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.run_state import Detail, RunState

if TYPE_CHECKING:
    from kerasdp.data.batch import Batch


class PipelineParallel(Strategy):
    """The stages of a run, as seen by one of its processes. See `kerasdp.backends.base.Strategy`.

    Attributes:
        stage_group: the processes that hold this one's pipeline.
        replica_group: those that hold replicas of this one's stages.
    """

    shard = (0, 1)
    splits_batches = True

    def __init__(self, devices: Devices, config: Config):
        """Joins the process groups. Call before Keras is imported."""
        self.config, self.num_devices, self.num_replicas = config, devices.count, 1
        self.device, timeout = device_of_process(devices, config), timeout_of(config)
        self.processes = join_processes(devices, self.device, timeout, config)
        self.stages: StagedModels[Pipeline] = StagedModels(
            config, lambda model: Pipeline(model, self), self.shard_batch
        )
        if devices.count == 1 and not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        length = devices.count // config.num_pipelines(devices.count)
        ranks = torch.arange(devices.count).reshape(-1, length)
        self.stage_group, self.replica_group = (
            next(group for group in groups if dist.get_rank(group) >= 0)
            for groups in ([dist.new_group(part.tolist(), timeout) for part in parts] for parts in (ranks, ranks.T))
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are made: in host memory, which may hold more than a device does."""
        import keras

        with keras.device("cpu"):
            yield

    @contextlib.contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Returns the context around `fit`, `evaluate` and `predict`: what Keras makes is on the device.

        The training function, in which they are called, has that of `scope`, in which Keras computes on the CPU.
        """
        import keras

        with keras.device(str(self.device)):
            yield

    def begin_reading_thread(self) -> None:
        """Lets a reading thread work with this process's GPU."""
        begin_thread(self.device)

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings targets to every device, inputs to that of the first stage alone."""
        device_batch = put_batch(batch, self.device)
        is_first = dist.get_rank(self.stage_group) == 0
        return device_batch if is_first else device_batch._replace(inputs=None)

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that work on all stages."""
        pipeline = self.stages.engine_of(model)

        def train(batch: DeviceBatch, _: Detail) -> Trained:
            with numbers_made_on(self.device):
                loss, rate, logs = pipeline.train_step(batch)
            return Trained(to_host(loss), to_host(rate), logs, {})

        @torch.no_grad()
        def test(batch: DeviceBatch) -> dict[str, Any]:
            with numbers_made_on(self.device):
                return pipeline.test_step(batch)

        @torch.no_grad()
        def predict(batch: DeviceBatch) -> Any:
            with numbers_made_on(self.device):
                return pipeline.predict_step(batch)

        return StepFunctions(train=train, test=test, predict=predict)

    def set_training(self, model: Any, is_training: bool) -> None:
        """Switches the modules of torch within the model, as Keras' own `fit` and `evaluate` do."""
        model.train(is_training)

    def diverged_variables(self, model: Any) -> list[str]:
        """Names of the variables that are not bit-equal in all pipelines."""
        return differing_variables(self.stages.engine_of(model).own_variables(), self.processes)

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device (on the CPU: each process) has used."""
        return self.processes.all_gather_object(self.peak_memory_bytes())

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes that a device (on the CPU: this process) has used."""
        return peak_memory_bytes(self.device)
