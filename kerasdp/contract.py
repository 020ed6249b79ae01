"""Defines the contract between a backend and the rest of kerasdp, as typed protocols.

Each folder of `kerasdp.backends` has these names:

- `devices.make_devices(config, cluster)`: chooses the devices of a run and makes virtual ones;
- `devices.start_workers(worker, devices, settings, train)`: calls a function in each worker process;
- `data_parallel.DataParallel`: a `Strategy`, the whole of what differs between the backends in a worker. Others are in
  `kerasdp.scale`.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from kerasdp.data.sampling import Split
from kerasdp.processes.ranks import Processes
from kerasdp.processes.workers import peak_memory_of_process

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch
    from kerasdp.run_state import Detail, RunState


T = TypeVar("T")
# A torch, JAX or TensorFlow tensor.
Tensor = Any
# A tensor, or a dict, list or tuple of tensors (and None).
Structure = Any


class DeviceBatch(NamedTuple):
    """A `kerasdp.data.batch.Batch` on this process's devices: what the step functions get.

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
        observed: what `kerasdp.step.observer.observed` recorded.
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
        train_several: trains on several batches of one shape in one program, and gives the logs of the last. None: the
            steps of a call run one after the other.
        description: a line that says how the devices share the model; may be empty.
    """

    train: Callable[[DeviceBatch, "Detail"], Trained]
    test: Callable[[DeviceBatch], dict[str, Any]]
    predict: Callable[[DeviceBatch], Structure]
    train_several: Callable[[list[DeviceBatch]], Trained] | None = None
    description: str = ""


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

    def all_reduce_max_delayed(self, number: int) -> int:
        """See `Processes`."""
        return number

    def any_rank(self, flag: bool) -> bool:
        """See `Processes`."""
        return flag

    def open_scatter(self) -> None:
        """See `Processes`."""


class Strategy(Protocol):
    """How the devices of a run share the work: what differs between the backends in a worker.

    Made before Keras is imported. A strategy names this class as its base, and so has the answers written here; the
    others it gives itself.

    Attributes:
        processes: exchanges values between the processes of the run.
        split: how the replicas split a batch. A `fit` sets it: batches of a training may have micro-batches.
    """

    processes: Processes
    split: Split

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are built and compiled."""
        return nullcontext()

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Brings a batch to the devices of this process. Called in a reading thread."""

    def running(self, model: "keras.Model") -> AbstractContextManager[None]:
        """Returns the context around `fit`, `evaluate` and `predict`."""
        return nullcontext()

    def step_functions(self, model: "keras.Model", run_state: "RunState") -> StepFunctions:
        """Returns the step functions that train, test and predict with a built model on all devices.

        `run_state` says how many steps there will be.
        """

    def each_replica(self, function: Callable[[], T], is_traced: bool = False) -> list[T]:
        """Calls a function in each replica of this process, and returns the results in the order of the replicas.

        Args:
            function: of nothing.
            is_traced: whether it computes with tensors that have no numbers, as what compiles a step does. jax always
                traces: called eagerly, each operation would be compiled by itself.

        Raises:
            Exception: of the framework's, where a function that is traced asks for a number.
        """

    def shard_steps(self, model: "keras.Model") -> Any:
        """Returns the `kerasdp.step.replica.ShardSteps` of a model, for calls within `each_replica`.

        For strategies that split batches.
        """

    def diverged_variables(self, model: "keras.Model", state_only: bool = False) -> list[str]:
        """Returns the paths of variables, seeds included, that are not bit-equal on all replicas.

        `state_only`: of those alone that are not trained.
        """

    def gather_variables(self, model: "keras.Model") -> None:
        """Gives each process the values of all variables, where it computes only some of them."""

    def read(self, model: "keras.Model", variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """Returns what `take` makes of each variable's value. Called by all processes together, as `gather_variables`.

        Of variables that are held in parts, one whole is there at a time. With None this process wants nothing.
        """
        self.gather_variables(model)
        return [] if take is None else [take(variable) for variable in variables]

    def peak_memory_bytes(self) -> int:
        """Returns the most bytes that a device of this process (on the CPU: the process) has used."""
        return peak_memory_of_process()
