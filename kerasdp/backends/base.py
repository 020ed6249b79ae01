"""Defines the contract between a backend and the rest of kerasdp, as typed protocols.

Each folder of `kerasdp.backends` has these names:

- `devices.make_devices(config, cluster)`: chooses the devices of a run and makes virtual ones;
- `devices.start_workers(worker, devices, settings, train)`: calls a function in each worker process;
- `data_parallel.DataParallel`, `pipeline_parallel.PipelineParallel` (with JAX also `tensor_parallel.TensorParallel`): a
  `Strategy`, the whole of what differs between the backends in a worker.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from kerasdp.config import Config
from kerasdp.data.sampling import Split
from kerasdp.runtime.model_cache import ModelCache
from kerasdp.runtime.ranks import Processes
from kerasdp.runtime.workers import peak_memory_of_process

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch
    from kerasdp.pipeline.plan import Plan
    from kerasdp.runtime.run_state import Detail, RunState


T = TypeVar("T")
# A torch, JAX or TensorFlow tensor.
Tensor = Any
# A tensor, or a dict, list or tuple of tensors (and None).
Structure = Any


class DeviceBatch(NamedTuple):
    """A `kerasdp.data.feed.Batch` on this process's devices: what the step functions get.

    Attributes:
        inputs: the rows of this process's replicas, with padding, as `kerasdp.data.sampling.Split` says.
        targets: likewise; None if there are none.
        sample_weight: likewise.
        indices: place in the data set of each row of the global batch; its length is the number of real rows.
    """

    inputs: Structure
    targets: Structure
    sample_weight: Structure
    indices: Any


class Trained(NamedTuple):
    """What a training step gives. With several steps, `loss` and `learning_rate` have an entry a step.

    Attributes:
        loss: of the global batch, a scalar tensor; None if the step does not tell it.
        learning_rate: with which the weights were updated, a scalar tensor; None likewise.
        logs: Keras' logs: the metrics of the epoch up to here.
        observed: what `kerasdp.backends.observer.observed` recorded.
    """

    loss: Tensor | None
    learning_rate: Tensor | None
    logs: dict[str, Any]
    observed: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFunctions:
    """What `kerasdp.training.loop` calls for each batch of a model; the model's variables hold the state.

    Attributes:
        train: trains on a batch, and records as much as its second argument says.
        test: updates the metrics; returns Keras' logs.
        predict: returns the outputs of the global batch.
        train_several: trains on several batches of one shape in one program, and gives the logs of the last; None if
            the strategy takes no `steps_per_execution`.
    """

    train: Callable[[DeviceBatch, "Detail"], Trained]
    test: Callable[[DeviceBatch], dict[str, Any]]
    predict: Callable[[DeviceBatch], Structure]
    train_several: Callable[[list[DeviceBatch]], Trained] | None = None


class ShardPass(NamedTuple):
    """What a forward pass of training gives on one replica.

    Attributes:
        layers: outputs of each layer, for this replica's rows, in the order of the calls.
        outputs: of the model, for the global batch, if the loss is computed of these.
        loss: of the global batch; None if it was not computed.
        first_row: index of the replica's first row in the global batch.
        num_rows: rows of the replica that are not padding.
        rows: of the replica, padding included.
    """

    layers: dict[str, Tensor]
    outputs: list[Tensor]
    loss: Tensor
    first_row: int
    num_rows: int
    rows: int


class SingleProcess:
    """`Processes` where one process drives all devices."""

    rank, num_processes = 0, 1

    def all_gather_object(self, value: T) -> list[T]:
        """See `Processes`."""
        return [value]

    def broadcast_from_rank0(self, values: list[float]) -> list[float]:
        """See `Processes`."""
        return values

    def all_reduce_max_delayed(self, number: int) -> int:
        """See `Processes`."""
        return number

    def any_rank(self, flag: bool) -> bool:
        """See `Processes`."""
        return flag

    def open_scatter(self) -> None:
        """See `Processes`."""


# (stage, "forward" or "backward", micro-batch, begin, end), in seconds.
Work = tuple[int, str, int, float, float]


class PipelineEngine:
    """Trains one model in stages.

    Attributes:
        plan: how model and batch are cut.
        timeline: if a list, takes all work of this process, which is then waited for.
        processes: of the run.
    """

    def __init__(self, model: "keras.Model", plan: "Plan", processes: Processes):
        self.model, self.optimizer = model, getattr(model, "optimizer", None)
        self.plan, self.processes = plan, processes
        self.timeline: list[Work] | None = None
        self._compiled_with = self._made_by_compile()

    def _made_by_compile(self) -> tuple[Any, ...]:
        from kerasdp.keras_compat.models import made_by_compile

        return getattr(self.model, "optimizer", None), *made_by_compile(self.model)

    @property
    def is_stale(self) -> bool:
        """Returns whether the model was compiled again since the engine was made."""
        return any(new is not old for new, old in zip(self._made_by_compile(), self._compiled_with))

    def seconds_without_update(self, batch: DeviceBatch) -> float:
        """Returns the seconds of a training step's passes, which leave no trace in any variable."""
        raise NotImplementedError

    def gather_variables(self) -> None:
        """Gives each process the values of all variables, where it computes only some of them."""


Engine = TypeVar("Engine", bound=PipelineEngine)


class StagedModels(Generic[Engine]):
    """Makes and keeps an engine for each model.

    Args:
        config: of the run.
        make_engine: makes the engine of a model.
        shard_batch: of the strategy.
    """

    def __init__(
        self,
        config: Config,
        make_engine: Callable[["keras.Model"], Engine],
        shard_batch: Callable[["Batch"], DeviceBatch],
    ):
        self.config, self._make_engine, self._shard_batch = config, make_engine, shard_batch
        self._engines: ModelCache[Engine] = ModelCache()
        self._tuned: ModelCache[Engine] = ModelCache()

    def engine_of(self, model: "keras.Model") -> Engine:
        """Returns the engine of a model, made on the first call, and again once the model is compiled again."""
        engine = self._engines.get(model)
        if engine is None or engine.is_stale:
            engine = self._make_engine(model)
            self._engines.put(model, engine)
        return engine

    def tune(self, model: "keras.Model", first_batch: Callable[[], "Batch"], report: Callable[[str], None]) -> None:
        """Chooses the size of micro-batches where it depends on the data: by trying, or by these batches' rows.

        Args:
            model: built and compiled.
            first_batch: gives one of the batches to train on.
            report: is told what was tried.
        """
        from kerasdp.pipeline.plan import find_size, with_rows

        engine = self.engine_of(model)
        if self.config.split_size != "auto":
            plan = with_rows(engine.plan, self.config, len(first_batch().indices))
            if plan.size != engine.plan.size:  # a new plan is new graphs on TensorFlow
                engine.plan = plan
        elif self._tuned.get(model) is not engine:
            self._tuned.put(model, engine)
            find_size(engine, self._shard_batch(first_batch()), report)

    def micro_batch_rows(self, model: "keras.Model") -> int:
        """Returns the rows of a micro-batch, over all pipelines."""
        return self.engine_of(model).plan.size


class Strategy(Protocol):
    """How the devices of a run share the work: what differs between the backends in a worker.

    Made before Keras is imported. A strategy names this class as its base, and so has the answers written here; the
    others it gives itself.

    Attributes:
        config: of the run.
        processes: exchanges values between the processes of the run.
        num_devices: over all processes.
        num_replicas: of the model, over all processes.
        shard: of the inputs that this process reads: its number, and of how many.
        splits_batches: whether layers are run on a shard of the batch alone; else one program on all of it.
        takes_several_steps: whether several steps can be one program, as Keras' `steps_per_execution` asks for.
        stages: the models trained in stages, and their engines; None where a model is one program.
    """

    config: Config
    processes: Processes
    num_devices: int
    num_replicas: int
    shard: tuple[int, int]
    splits_batches: bool
    takes_several_steps: bool = False
    stages: StagedModels[Any] | None = None

    @functools.cached_property
    def split(self) -> Split:
        """Returns how the replicas split a batch."""
        return Split(self.num_replicas)

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are built and compiled."""
        return nullcontext()

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings a batch to the devices of this process. Called in a reading thread."""

    def begin_reading_thread(self) -> None:
        """Prepares a thread that is to read batches, and to call `shard_batch`, before it does."""
        return

    def running(self, model: "keras.Model") -> AbstractContextManager[None]:
        """Returns the context around `fit`, `evaluate` and `predict`."""
        return nullcontext()

    def compiling(self) -> AbstractContextManager[None]:
        """Returns the context of what compiles in a later step than the first; `launch` gives a watchdog's."""
        return nullcontext()

    def step_functions(self, model: "keras.Model", run_state: "RunState") -> StepFunctions:
        """Returns the step functions that train, test and predict with a built model on all devices.

        `run_state` says how many steps there will be.
        """

    def set_training(self, model: "keras.Model", is_training: bool) -> None:
        """Switches what knows a mode of training within a model, as torch's modules do; layers of Keras are told."""

    def in_replicas(self, function: Callable[[], None]) -> None:
        """Calls a function in each replica of this process, as its step would be."""
        function()

    def trace(self, function: Callable[[], None]) -> None:
        """Calls a function in each replica of this process, on tensors without numbers, as what compiles a step does.

        Raises:
            Exception: of the framework's, where the function asks for a number.
        """

    def try_own_step(self, model: "keras.Model", batch: DeviceBatch) -> list[tuple[str, Any]]:
        """Runs the model's own `train_step` on each replica's rows, without an update.

        Returns:
            What it found: see `kerasdp.portability.own_steps.Share`.
        """

    def build_optimizer(self, optimizer: "keras.optimizers.Optimizer", variables: list[Any]) -> None:
        """Builds an optimizer from within a replica, once for all of this process."""
        optimizer.build(variables)

    def shard_passes(self, model: "keras.Model", batch: DeviceBatch, *, with_loss: bool) -> list[ShardPass]:
        """Runs a forward pass of training on each replica of this process; no variable changes.

        For strategies that split batches.
        """

    def variables_outside_scope(self, model: "keras.Model") -> list[str]:
        """Returns the paths of variables that were not made within `scope`, where that makes a difference."""
        return []

    def try_call(self, function: Callable[[Structure], Any], arrays: Structure) -> None:
        """Calls a function of arrays for what its Python code does, whatever it gives."""
        function(arrays)

    def diverged_variables(self, model: "keras.Model", state_only: bool = False) -> list[str]:
        """Returns the paths of variables, seeds included, that are not bit-equal on all replicas.

        `state_only`: of those alone that are not trained.
        """

    def gather_variables(self, model: "keras.Model") -> None:
        """Gives each process the values of all variables, where it computes only some of them."""
        if self.stages is not None:
            self.stages.engine_of(model).gather_variables()

    def read(self, model: "keras.Model", variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """Returns what `take` makes of each variable's value. Called by all processes together, as `gather_variables`.

        Of variables that are held in parts, one whole is there at a time. With None this process wants nothing.
        """
        self.gather_variables(model)
        return [] if take is None else [take(variable) for variable in variables]

    def description(self, model: "keras.Model") -> str:
        """Returns what there is to say of how the work is shared; may be empty."""
        return "" if self.stages is None else str(self.stages.engine_of(model).plan)

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device (torch on the CPU: each process) has used; empty if not known."""

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes that a device (on the CPU: this process) has used. Asks no other process."""
        return max(self.peak_memory_by_device(), default=0) or peak_memory_of_process()
