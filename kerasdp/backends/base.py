"""The contract between a backend and the rest of the kit, as typed protocols.

Each folder of `kerasdp.backends` has these names:

- `devices.make_devices(config)`: chooses the devices of a run and makes virtual ones;
- `devices.start_workers(worker, devices, *args)`: calls a function in each worker process;
- `data_parallel.DataParallel`, `pipeline_parallel.PipelineParallel` (with JAX also `tensor_parallel.TensorParallel`): a
  `Strategy`, the whole of what differs between the backends in a worker.
"""

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import keras

    from kerasdp.data.feed import Batch, Feed
    from kerasdp.pipeline.plan import Plan
    from kerasdp.runtime.run_state import RunState

T = TypeVar("T")
# A torch, JAX or TensorFlow tensor.
Tensor = Any
# A tensor, or a dict, list or tuple of tensors (and None).
Structure = Any


class DeviceBatch(NamedTuple):
    """A `kerasdp.data.feed.Batch` on this process's devices: what the step functions get.

    Attributes:
        inputs: this process's rows, padded so that its replicas hold equally many.
        targets: of all rows of the global batch; None if there are none.
        sample_weight: likewise.
        indices: place in the data set of each row of the global batch; its length is the number of real rows.
    """

    inputs: Structure
    targets: Structure
    sample_weight: Structure
    indices: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFunctions:
    """What Keras' trainer calls for each batch, in place of the functions that it would make itself.

    Their arguments are those of the backend's trainer (keras/src/backend/*/trainer.py).
    """

    train: Callable[..., Any]
    test: Callable[..., Any]
    predict: Callable[..., Any]


class Processes(Protocol):
    """What the processes of a run tell one another.

    Attributes:
        rank: number of this process, from 0.
        num_processes: how many there are.
    """

    rank: int
    num_processes: int

    def all_gather_object(self, value: T) -> list[T]:
        """Returns what each process has, in the order of the ranks."""

    def broadcast_from_rank0(self, values: list[float]) -> list[float]:
        """Returns the values of rank 0."""

    def all_reduce_max_delayed(self, number: int) -> int:
        """Returns the maximum over the ranks of the numbers of the call before this one, so that nobody waits."""

    def any_rank(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""


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


class Strategy(Protocol):
    """How the devices of a run share the work: what differs between the backends in a worker.

    Made before Keras is imported.

    Attributes:
        processes: what the processes of the run tell one another.
        num_devices: over all processes.
        num_replicas: of the model, over all processes.
        shard: of the inputs that this process reads: its number, and of how many.
        splits_batches: whether layers are run on a shard of the batch alone; else one program on all of it.
        takes_several_steps: whether the step functions heed Keras' `steps_per_execution`.
    """

    processes: Processes
    num_devices: int
    num_replicas: int
    shard: tuple[int, int]
    splits_batches: bool
    takes_several_steps: bool

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are built and compiled."""

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings a batch to the devices of this process. Called in a reading thread."""

    def adapt(self, feed: "Feed") -> Iterable[Any]:
        """Returns what Keras' `fit` is to iterate over in place of the feed."""

    def running(self, model: "keras.Model") -> AbstractContextManager[None]:
        """Returns the context around Keras' `fit`, `evaluate` and `predict`."""

    def step_functions(self, model: "keras.Model", run_state: "RunState") -> StepFunctions:
        """Returns the step functions that train, test and predict with a built model on all devices."""

    def variables_outside_scope(self, model: "keras.Model") -> list[str]:
        """Returns the paths of variables that were not made within `scope`, where that makes a difference."""

    def diverged_variables(self, model: "keras.Model") -> list[str]:
        """Returns the paths of variables, seeds included, that are not bit-equal on all replicas."""

    def gather_variables(self, model: "keras.Model") -> None:
        """Gives each process the values of all variables, where it computes only some of them."""

    def description(self, model: "keras.Model") -> str:
        """Returns what there is to say of how the work is shared; may be empty."""

    def tune(self, model: "keras.Model", first_batch: Callable[[], "Batch"], report: Callable[[str], None]) -> None:
        """Finds what is to be found by trying, as the size of micro-batches, and reports it."""

    def micro_batch_rows(self, model: "keras.Model") -> int | None:
        """Returns the rows that a layer sees at once, if neither the global batch nor a replica's shard of it."""

    def engine_of(self, model: "keras.Model") -> "PipelineEngine | None":
        """Returns what trains the model in stages; None where each replica holds all of it."""

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device (torch on the CPU: each process) has used; empty if not known."""

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes that a device (on the CPU: this process) has used."""


# (stage, "forward" or "backward", micro-batch, begin, end), in seconds.
Work = tuple[int, str, int, float, float]


class PipelineEngine(Protocol):
    """Trains one model in stages.

    Attributes:
        plan: how model and batch are cut.
        timeline: if a list, takes all work of this process, which is then waited for.
        is_tuned: whether the size of micro-batches has been looked for.
        processes: of the run.
    """

    plan: "Plan"
    timeline: list[Work] | None
    is_tuned: bool
    processes: Processes

    @property
    def is_stale(self) -> bool:
        """Whether the model was compiled again since the engine was made."""

    def seconds_without_update(self, batch: DeviceBatch) -> float:
        """Returns the seconds of a training step's passes, which leave no trace in any variable."""
