"""PyTorch: trains a replica in each process, with DistributedDataParallel."""

import collections
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kerasdp.backends.torch.devices import TorchStrategy, timeout_of
from kerasdp.backends.torch.gradients import num_differentiated
from kerasdp.backends.torch.private import without_numbers
from kerasdp.backends.torch.train_step import RankSteps, numbers_made_on, to_host
from kerasdp.backends.torch.update import updating
from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, StepFunctions, T, Trained
from kerasdp.data.sampling import Split
from kerasdp.processes.devices import Devices
from kerasdp.processes.watchdog import shapes_of
from kerasdp.run_state import Detail, RunState
from kerasdp.step.replica import TrainedWeights

if TYPE_CHECKING:
    from kerasdp.data.batch import Batch

# Steps after which compiling (10 to 60 s) pays off, by the kind of device. A GPU saves more of each: of ResNet-18 there
# are 270 kernels in one CUDA graph, or 900 operations from Python.
_WORTH_COMPILING = {"cpu": 1000, "cuda": 200}


class DataParallel(TorchStrategy):
    """A replica of the model in each process. See `kerasdp.contract.Strategy`.

    Attributes:
        statistics_group: the processes, in a group for what batch norms exchange; None: that of the run.
    """

    statistics_group: Any = None

    def __init__(self, devices: Devices, config: Config):
        """Joins the process group. Call before Keras is imported."""
        super().__init__(devices, config)
        self.split = Split(devices.count, (self.processes.rank, devices.count))

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings this process's rows to its device."""
        return self.put_batch(batch)

    def parts_of(self, model: Any) -> Any:
        """Returns the `kerasdp.scale.torch_shards.Parts` of a model that this process holds; None if it holds all."""
        return None

    def open_statistics_group(self, model: Any) -> None:
        """Opens a group of its own for the statistics of a model's batch norms, if there are any to exchange.

        NCCL's messages of one group follow each other: statistics, for which the next layer waits, would come after up
        to 25 MiB of gradients that were given before.
        """
        from kerasdp.keras_compat.layers import all_layers
        from kerasdp.same.layers import BatchNormalization

        exchange = (isinstance(layer, BatchNormalization) and layer.statistics == "sync" for layer in all_layers(model))
        if self.split.num_replicas > 1 and self.statistics_group is None and any(exchange):
            self.statistics_group = torch.distributed.new_group(timeout=timeout_of(self.config))

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that work on all replicas.

        Args:
            model: a built Keras model.
            run_state: says how many steps there will be, and of how many rows: whether compiling pays off.
        """
        from kerasdp.backends.torch.compiled_step import CompiledOwnStep, CompiledTraining

        if self.is_gpu:
            self.open_statistics_group(model)
        steps, weights, parts = RankSteps(self, model), TrainedWeights(model), self.parts_of(model)
        parallel_for = None
        compiled: CompiledTraining | CompiledOwnStep | None = None
        is_own = "train_step" in steps.own
        if parts is not None:
            parts.require_steps_of_keras(steps.own)
        # The first user-defined step runs uncompiled, and tells whether it can be captured: one in the form of torch's
        # guide cannot, and an attempt would move what it counts in Python.
        is_captured = not is_own
        num_trained = collections.Counter[Any]()

        def train(batch: DeviceBatch, detail: Detail) -> Trained:
            nonlocal parallel_for, compiled, is_captured
            done = None
            if parts is not None:
                parts.cut()
                compiled = compiled or CompiledTraining(self, steps, parts)
            num_steps = self._steps_to_compile(run_state)
            if is_captured and self._compiles(model, num_steps, run_state.batch_size, batch, num_trained):
                compiled = compiled or (CompiledOwnStep if is_own else CompiledTraining)(self, steps)
                done = compiled(batch, detail)
            if done is None and is_own:
                before = num_differentiated()
                with numbers_made_on(self.device), updating(getattr(model, "optimizer", None)):
                    logs, _ = steps.own_step("train_step", batch)
                is_captured = num_differentiated() > before + 1
                done = logs.get("loss"), None, logs, {}
            elif done is None and compiled is not None and parts is not None:
                with numbers_made_on(self.device):
                    done = compiled.uncompiled(batch, detail)
            elif done is None:
                # Again when a callback has frozen a layer: DistributedDataParallel would wait for its gradients.
                if parallel_for != (trained := weights.key()):
                    steps.module = model
                    steps.module, parallel_for = steps.distributed(batch), trained
                with numbers_made_on(self.device):
                    done = steps.train(batch, detail)
            loss, rate, logs, seen = done
            return Trained(to_host(loss), to_host(rate), logs, seen)

        test, predict = (self._evaluation_function(name, run_state, steps, parts) for name in ("test", "predict"))
        return StepFunctions(train=train, test=test, predict=predict)

    def _evaluation_function(
        self, name: str, run_state: RunState, steps: RankSteps, parts: Any
    ) -> Callable[[DeviceBatch], Any]:
        """Makes the function `test` or `predict`."""
        from kerasdp.backends.torch.compiled_step import CompiledEvaluation

        compiled: CompiledEvaluation | None = None
        num_evaluated = collections.Counter[Any]()

        @torch.no_grad()
        def evaluate(batch: DeviceBatch) -> Any:
            nonlocal compiled
            evaluated, result = run_state.evaluated, None
            if parts is not None and parts.holds_weights:
                parts.cut()
                compiled = compiled or CompiledEvaluation(self, steps, name, parts)
            if (
                f"{name}_step" not in steps.own
                and evaluated
                and self._compiles(steps.model, *evaluated, batch, num_evaluated)
            ):
                compiled = compiled or CompiledEvaluation(self, steps, name)
                result = compiled(batch)
            if result is not None:
                return result
            with numbers_made_on(self.device):
                if compiled is not None and compiled.parts is not None:
                    return compiled.uncompiled(batch)
                return getattr(steps, name)(batch)

        return evaluate

    def each_replica(self, function: Callable[[], T], is_traced: bool = False) -> list[T]:
        """See `Strategy`."""
        with without_numbers() if is_traced else contextlib.nullcontext():
            return [function()]

    def shard_steps(self, model: Any) -> RankSteps:
        """See `Strategy`."""
        return RankSteps(self, model)

    def _compiles(
        self,
        model: Any,
        num_steps: int | None,
        batch_size: int | None,
        batch: DeviceBatch,
        seen: collections.Counter[Any],
    ) -> bool:
        """Returns whether a step is compiled. The step of a batch that is not full never is.

        Args:
            model: whose step it is.
            num_steps: there are to come; None if that is not known.
            batch_size: rows of a full batch.
            batch: of the step.
            seen: counts the batches of each shape where `num_steps` is not known; the same on all ranks.
        """
        choice, enough = self.config.compile, _WORTH_COMPILING[self.device.type]
        if model.run_eagerly or choice == "off" or len(batch.indices) != batch_size:
            return False
        if choice != "auto":
            return True
        if num_steps is not None:
            return num_steps >= enough
        # As many as were seen may be to come. A resumed run begins to count again, which --deterministic must not show.
        shapes = shapes_of(batch[:3])
        seen[shapes] += 1
        return seen[shapes] > enough and not self.config.deterministic

    def _steps_to_compile(self, run_state: RunState) -> int | None:
        """Returns the steps of this process, in which compiling pays off or not; None if not known.

        With --deterministic a resumed run decides as the one before it did, or they would differ by round-off.
        """
        if run_state.num_steps is None or self.config.deterministic:
            return run_state.num_steps
        return run_state.num_steps - run_state.first_step
