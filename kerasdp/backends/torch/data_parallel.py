"""Trains one replica of the model in each PyTorch process, with DistributedDataParallel."""

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

# The number of steps from which compiling (10 to 60 s) pays off, by the kind of device. On a GPU each step saves more:
# ResNet-18 runs 270 kernels in one CUDA graph instead of 900 operations from Python.
_WORTH_COMPILING = {"cpu": 1000, "cuda": 200}


class DataParallel(TorchStrategy):
    """Trains one replica of the model in each process. Implements `kerasdp.contract.Strategy`.

    Attributes:
        statistics_group: the process group in which batch norms exchange statistics, or None for the default group.
    """

    statistics_group: Any = None

    def __init__(self, devices: Devices, config: Config):
        """Joins the process group of the run. Keras must not be imported yet."""
        super().__init__(devices, config)
        self.split = Split(devices.count, (self.processes.rank, devices.count))

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Copies this process's rows of a batch to its device."""
        return self.put_batch(batch)

    def parts_of(self, model: Any) -> Any:
        """Returns the sharded variables of a model, or None if the strategy shards no variables.

        Here the result is always None. Subclasses return a `kerasdp.scale.torch_shards.Parts`.
        """
        return None

    def open_statistics_group(self, model: Any) -> None:
        """Creates a process group for batch norm statistics, if the model has synchronized batch norms.

        NCCL sends the messages of one group in order. In the default group, statistics would wait for up to 25 MiB of
        gradients, and the next layer would wait for the statistics.
        """
        from kerasdp.keras_compat.layers import all_layers
        from kerasdp.same.layers import BatchNormalization

        exchange = (isinstance(layer, BatchNormalization) and layer.statistics == "sync" for layer in all_layers(model))
        if self.split.num_replicas > 1 and self.statistics_group is None and any(exchange):
            self.statistics_group = torch.distributed.new_group(timeout=timeout_of(self.config))

    def step_functions(self, model: Any, run_state: RunState) -> StepFunctions:
        """Makes the train, test and predict functions of this replica.

        Args:
            model: a built Keras model.
            run_state: the state of the run. Its number of steps and its batch size determine whether steps are
                compiled.
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
        # The first user-defined step runs uncompiled. It shows whether the step can be captured. A step written as in
        # Keras' guide for torch cannot, and an attempt would change its counters in Python.
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
                # Wrap again when a callback has frozen a layer: DistributedDataParallel would wait for its gradients.
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
        """Makes the function that evaluates a batch, or predicts for a batch.

        Args:
            name: the method of `RankSteps` that the function runs: `test` or `predict`.
            run_state: the state of the run.
            steps: the uncompiled steps of the model.
            parts: the sharded variables, or None if no variables are sharded.
        """
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
        """Calls a function in the single replica of this process. See `Strategy.each_replica`."""
        with without_numbers() if is_traced else contextlib.nullcontext():
            return [function()]

    def shard_steps(self, model: Any) -> RankSteps:
        """Returns the `RankSteps` of a model."""
        return RankSteps(self, model)

    def _compiles(
        self,
        model: Any,
        num_steps: int | None,
        batch_size: int | None,
        batch: DeviceBatch,
        seen: collections.Counter[Any],
    ) -> bool:
        """Returns whether the step for a batch is compiled. The step for an incomplete batch is never compiled.

        Args:
            model: the model of the step.
            num_steps: the expected number of steps, or None if this number is unknown.
            batch_size: the number of rows in a complete batch.
            batch: the batch of the step.
            seen: the number of earlier batches of each shape. The method updates `seen` if `num_steps` is None. The
                content of `seen` is the same on all ranks.
        """
        choice, enough = self.config.compile, _WORTH_COMPILING[self.device.type]
        if model.run_eagerly or choice == "off" or len(batch.indices) != batch_size:
            return False
        if choice != "auto":
            return True
        if num_steps is not None:
            return num_steps >= enough
        # Expect as many steps as were seen. A resumed run counts from 0, so with --deterministic nothing is compiled.
        shapes = shapes_of(batch[:3])
        seen[shapes] += 1
        return seen[shapes] > enough and not self.config.deterministic

    def _steps_to_compile(self, run_state: RunState) -> int | None:
        """Returns the number of training steps that decides whether to compile, or None if the number is unknown.

        Without --deterministic, this is the number of steps that this process will run. With --deterministic, it is the
        number of all steps of the run, including the steps before a resume. So a resumed run compiles its steps if the
        first run did. Then both runs have the same rounding errors.
        """
        if run_state.num_steps is None or self.config.deterministic:
            return run_state.num_steps
        return run_state.num_steps - run_state.first_step
