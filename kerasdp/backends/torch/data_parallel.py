"""PyTorch: trains a replica in each process, with DistributedDataParallel."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from kerasdp.backends.base import DeviceBatch, ShardPass, StepFunctions, Strategy, Trained
from kerasdp.backends.steps import TrainedWeights
from kerasdp.backends.torch.collectives import HostSums, gather_rows, gather_statistics, sum_over_ranks
from kerasdp.backends.torch.devices import (
    begin_thread,
    device_of_process,
    differing_variables,
    join_processes,
    peak_memory_bytes,
    put_batch,
    timeout_of,
)
from kerasdp.backends.torch.train_step import distributed, pass_seconds
from kerasdp.backends.torch.waits import numbers_made_on, to_host, updating_on
from kerasdp.config import Config
from kerasdp.config.validation import VIRTUAL
from kerasdp.data.sampling import Split
from kerasdp.portability.replica_context import ReplicaContext, gather_shards, use
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.run_state import Detail, RunState

if TYPE_CHECKING:
    from kerasdp.backends.torch.train_step import ShardSteps
    from kerasdp.data.batch import Batch

# Steps after which compiling (10 to 60 s on a CPU) pays off.
_WORTH_COMPILING = 1000


class DataParallel(Strategy):
    """A replica of the model in each process. See `kerasdp.backends.base.Strategy`.

    Attributes:
        statistics_group: the processes, in a group for what batch norms exchange; None: that of the run.
    """

    statistics_group: Any = None

    def __init__(self, devices: Devices, config: Config):
        """Joins the process group. Call before Keras is imported."""
        self.num_devices = self.num_replicas = devices.count
        self.config = config
        self.splits_batches = self.num_replicas > 1
        self.device = device_of_process(devices, config)
        self.is_gpu = self.device.type == "cuda"
        self.processes = join_processes(devices, self.device, timeout_of(config), config)
        self.shard = self.processes.rank, devices.count
        self.split = Split(devices.count, config.shares)
        # Where they are, gradients are added there.
        self.host_sums: HostSums | None = None
        if config.reduce == "host" and self.num_replicas > 1:
            self.host_sums = HostSums(self.device, timeout_of(config), config.gradient_precision)

    def begin_reading_thread(self) -> None:
        """Lets a reading thread work with this process's GPU."""
        begin_thread(self.device)

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings this process's rows to its device."""
        return put_batch(batch, self.device)

    def open_statistics_group(self, model: Any) -> None:
        """Opens a group of its own for the statistics of a model's batch norms, if there are any to exchange.

        NCCL's messages of one group follow each other: statistics, for which the next layer waits, would come after up
        to 25 MiB of gradients that were given before.
        """
        from kerasdp.keras_compat.layers import all_layers
        from kerasdp.portability.layers import BatchNormalization

        exchange = (isinstance(layer, BatchNormalization) and layer.statistics == "sync" for layer in all_layers(model))
        if self.num_replicas > 1 and self.statistics_group is None and any(exchange):
            self.statistics_group = torch.distributed.new_group(timeout=timeout_of(self.config))

    def context(self, model: Any, num_rows: int, step: str = "call") -> ReplicaContext | None:
        """Returns the context of a step of a model on a global batch of `num_rows` rows; `step`: see `row_axes_of`."""
        from kerasdp.portability.row_search import context_of

        if self.num_replicas == 1:
            return None
        gather = functools.partial(gather_statistics, group=self.statistics_group)
        place = self.processes.rank, self.split.replicas(num_rows)
        return context_of(model, step, *place, gather=gather, gather_rows=lambda rows: self.gather(rows, num_rows))

    def gather(self, outputs: Any, num_rows: int) -> Any:
        """Gathers the rows of all replicas, without padding; axis 0 may hold several entries for each row.

        Its gradient is made so that the MEAN over the replicas (which DistributedDataParallel takes) of the
        gradients of a weight is the gradient of the loss of the global batch, whatever that loss is.
        """
        import keras

        if self.num_replicas == 1:
            return outputs
        replicas = self.split.replicas(num_rows)
        own = replicas[self.processes.rank]

        def gather(rows: torch.Tensor) -> torch.Tensor:
            return gather_shards(rows, own, replicas, gather_rows)

        return keras.tree.map_structure(gather, outputs)

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that work on all replicas.

        Args:
            model: a built Keras model.
            run_state: says how many steps there will be, and of how many rows: whether compiling pays off.
        """
        from kerasdp.backends.torch.compiled_step import CompiledTraining
        from kerasdp.backends.torch.train_step import ShardSteps, train_step
        from kerasdp.keras_compat.models import own_steps

        if self.is_gpu:
            self.open_statistics_group(model)
        own = own_steps(model)
        steps, weights = ShardSteps(model), TrainedWeights(model)
        parallel = compiled = parallel_for = None

        def train(batch: DeviceBatch, detail: Detail) -> Trained:
            nonlocal parallel, parallel_for, compiled
            if "train_step" in own:
                with numbers_made_on(self.device), updating_on(self.device, model.optimizer):
                    logs = self._own_step(model, "train_step", batch)
                return Trained(to_host(logs.get("loss")), None, logs, {})
            done = None
            if self._compiles(model, run_state.num_steps, len(batch.indices) == run_state.batch_size):
                compiled = compiled or CompiledTraining(self, model, steps)
                done = compiled(batch, detail)
            if done is None:
                # Again when a callback has frozen a layer: DistributedDataParallel would wait for its gradients.
                if parallel_for != (trained := weights.key()):
                    parallel = None
                    parallel, parallel_for = distributed(self, model, batch), trained
                with numbers_made_on(self.device):
                    done = train_step(self, model, parallel, steps, batch, detail)
            loss, rate, logs, seen = done
            return Trained(to_host(loss), to_host(rate), logs, seen)

        test, predict = (self._evaluation_function(name, model, run_state, steps) for name in ("test", "predict"))
        return StepFunctions(train=train, test=test, predict=predict)

    def set_training(self, model: Any, is_training: bool) -> None:
        """Switches the modules of torch within the model, as Keras' own `fit` and `evaluate` do."""
        model.train(is_training)

    def _evaluation_function(
        self, name: str, model: Any, run_state: RunState, steps: "ShardSteps"
    ) -> Callable[[DeviceBatch], Any]:
        """Makes the function `test` or `predict`."""
        from kerasdp.backends.torch.compiled_step import CompiledEvaluation
        from kerasdp.keras_compat.models import own_steps

        own = own_steps(model)
        compiled = None

        @torch.no_grad()
        def evaluate(batch: DeviceBatch) -> Any:
            nonlocal compiled
            evaluated = run_state.evaluated
            num_rows, result = len(batch.indices), None
            if f"{name}_step" in own:
                with numbers_made_on(self.device):
                    if name == "predict":
                        return self._own_predict_step(model, batch)
                    return self._own_step(model, "test_step", batch)
            if evaluated and self._compiles(model, evaluated.num_batches, num_rows == evaluated.batch_size):
                compiled = compiled or CompiledEvaluation(self, model, steps, name)
                result = compiled(batch)
            if result is not None:
                return result
            with numbers_made_on(self.device):
                return getattr(steps, name)(batch, self.context(model, num_rows))

        return evaluate

    def _own_step(self, model: Any, name: str, batch: DeviceBatch) -> dict[str, Any]:
        """Runs a user-defined step; returns Keras' logs, for the global batch."""
        from kerasdp.keras_compat.models import as_keras_gives
        from kerasdp.portability.own_steps import join_steps

        if self.num_replicas == 1:
            return getattr(model, name)(as_keras_gives(batch[:3]))
        with join_steps(model):
            return self._on_own_rows(model, name, batch)[0]

    def _own_predict_step(self, model: Any, batch: DeviceBatch) -> Any:
        from kerasdp.keras_compat.models import as_keras_gives

        num_rows = len(batch.indices)
        with use(self.context(model, num_rows, "predict_step")):
            outputs = model.predict_step(as_keras_gives((batch.inputs, None, None)))
        return self.gather(outputs, num_rows)

    def _on_own_rows(self, model: Any, name: str, batch: DeviceBatch, is_trial: bool = False) -> Any:
        from kerasdp.portability.own_steps import run_on_shard

        context = cast(ReplicaContext, self.context(model, len(batch.indices), name))
        add_up = sum_over_ranks if self.host_sums is None else self.host_sums.sum
        return run_on_shard(model, name, batch[:3], context, add_up, self.build_optimizer, is_trial)

    def try_own_step(self, model: Any, batch: DeviceBatch) -> list[tuple[str, Any]]:
        """Runs the model's own `train_step` on this process's rows, without an update; returns what it found."""
        return self._on_own_rows(model, "train_step", batch, is_trial=True)[1]

    def _compiles(self, model: Any, num_steps: int | None, is_full: bool) -> bool:
        """Returns whether a step is compiled. The step of a smaller last batch (`is_full` False) never is.

        `num_steps`: of the whole training; None if that is not known.
        A resumed run must decide as the interrupted one did, or they would differ by round-off.
        """
        if model.run_eagerly or self.config.compile == "off" or self.host_sums is not None or not is_full:
            return False
        return self.config.compile == "on" or num_steps is None or num_steps >= _WORTH_COMPILING

    def shard_passes(self, model: Any, batch: DeviceBatch) -> list[ShardPass]:
        """Runs a forward pass of training on this process's replica; no variable changes."""
        from kerasdp.backends.torch.train_step import shard_passes

        return shard_passes(model, batch, self.context(model, len(batch.indices)))

    def pass_seconds(self, model: Any, batch: DeviceBatch) -> list[float]:
        """Returns the seconds of a forward and a backward pass of this process's rows."""
        return [pass_seconds(self, model, batch)]

    def description(self, model: Any) -> str:
        """Returns where gradients are added, if that was chosen."""
        if self.config.reduce is None:
            return ""
        if not self.is_gpu:
            return f"--reduce={self.config.reduce}: {VIRTUAL}; Gloo adds the gradients there in any case"
        return "gradients are added " + ("in host memory, by Gloo" if self.host_sums else "on the GPUs, by NCCL")

    def diverged_variables(self, model: Any) -> list[str]:
        """Returns the paths of variables, seeds included, that are not bit-equal on all replicas."""
        return differing_variables(model.variables, self.processes)

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device (on the CPU: each process) has used."""
        return self.processes.all_gather_object(self.peak_memory_bytes())

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes that a device (on the CPU: this process) has used."""
        return peak_memory_bytes(self.device)
