"""Defines the typed protocols that connect a backend with the rest of kerasdp.

Each folder of `kerasdp.backends` provides these names:

- `devices.make_devices(config, cluster)`: chooses the devices of a run, and makes virtual devices;
- `devices.start_workers(worker, devices, settings, train)`: calls a function in each worker process;
- `data_parallel.DataParallel`: a `Strategy`. It contains the code of a worker process that depends on the backend.
  `kerasdp.scale` contains more strategies.
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
    """Holds a `kerasdp.data.batch.Batch` on the devices of this process, as input of the step functions.

    Attributes:
        inputs: model inputs of the rows of this process's replicas, with padding; see `kerasdp.data.sampling.Split`.
        targets: targets of these rows; None if there are no targets.
        sample_weight: sample weights of these rows; None if there are no weights.
        indices: index in the data set of each row of the global batch. `len(indices)` is the number of rows without
            padding.
    """

    inputs: Structure
    targets: Structure
    sample_weight: Structure
    indices: Any


class Trained(NamedTuple):
    """Holds the results of a training step.

    If one call runs several steps, `loss` and `learning_rate` have one entry for each step.

    Attributes:
        loss: loss of the global batch, a scalar tensor; None if the step does not return it.
        learning_rate: learning rate of the update, a scalar tensor; None if the step does not return it.
        logs: the Keras logs, with the metrics of the epoch so far.
        observed: values that `kerasdp.step.observer.observed` recorded.
    """

    loss: Tensor | None
    learning_rate: Tensor | None
    logs: dict[str, Any]
    observed: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFunctions:
    """Holds the functions that `kerasdp.training.loop` calls for each batch.

    The functions store their state in the variables of the model.

    Attributes:
        train: function that trains on a batch. Its second argument says which values to record.
        test: function that updates the metrics for a batch, and returns the Keras logs.
        predict: function that returns the outputs for the global batch.
        train_several: function that trains on several batches of the same shape in one program, and returns the logs of
            the last step. None: `train` is called for each batch.
        description: text that says how the devices share the model; may be empty.
    """

    train: Callable[[DeviceBatch, "Detail"], Trained]
    test: Callable[[DeviceBatch], dict[str, Any]]
    predict: Callable[[DeviceBatch], Structure]
    train_several: Callable[[list[DeviceBatch]], Trained] | None = None
    description: str = ""


class ShardPass(NamedTuple):
    """Holds the results of one replica's forward pass in training mode.

    Attributes:
        layers: outputs of each layer for this replica's rows, in the order of the calls.
        outputs: outputs of the model for the rows from which the replica computes the loss: its rows, or all rows.
        loss: loss of the global batch; None if no loss was computed.
        first_row: index of the replica's first row in the global batch.
        num_rows: number of the replica's rows without padding.
        rows: number of the replica's rows with padding.
    """

    layers: dict[str, Tensor]
    outputs: list[Tensor]
    loss: Tensor
    first_row: int
    num_rows: int
    rows: int


class SingleProcess:
    """Implements `Processes` for a single process that controls all devices."""

    rank, num_processes = 0, 1

    def all_gather_object(self, value: T) -> list[T]:
        """Returns a list that contains only `value`, since there is only one rank."""
        return [value]

    def all_reduce_max_delayed(self, number: int) -> int:
        """Returns `number` unchanged, since there is only one rank."""
        return number

    def any_rank(self, flag: bool) -> bool:
        """Returns `flag` unchanged, since there is only one rank."""
        return flag

    def open_scatter(self) -> None:
        """Returns None, since there is no other process to send data to."""


class Strategy(Protocol):
    """Defines how the devices of a run share the work.

    A strategy contains the code of a worker process that depends on the backend. kerasdp makes the strategy before it
    imports Keras. A strategy inherits from this class, and implements the methods that have no body here.

    Attributes:
        processes: object that exchanges values between the processes of the run.
        split: how each batch is split over the replicas. Each `fit` sets a new split, since training batches may have
            micro-batches.
    """

    processes: Processes
    split: Split

    def scope(self) -> AbstractContextManager[None]:
        """Returns the context in which models are built and compiled."""
        return nullcontext()

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Copies a batch to the devices of this process. The reading threads of a feed call this method."""

    def running(self, model: "keras.Model") -> AbstractContextManager[None]:
        """Returns the context in which `fit`, `evaluate` and `predict` run."""
        return nullcontext()

    def step_functions(self, model: "keras.Model", run_state: "RunState") -> StepFunctions:
        """Returns the step functions that train, evaluate and predict with a built model on all devices.

        `run_state.num_steps` is the number of steps that the run will have; None if not known.
        """

    def each_replica(self, function: Callable[[], T], is_traced: bool = False) -> list[T]:
        """Calls a function for each replica of this process. Returns the results in the order of the replicas.

        Args:
            function: a function without arguments.
            is_traced: whether the function runs with abstract tensors that have no values, as under a compiler. JAX
                always traces the function once for all replicas: eager calls would compile each operation separately.

        Raises:
            Exception: the framework's error if a traced function needs the value of a tensor.
        """

    def shard_steps(self, model: "keras.Model") -> Any:
        """Returns the `kerasdp.step.replica.ShardSteps` of a model, for calls within `each_replica`.

        Only strategies that split batches implement this method.
        """

    def diverged_variables(self, model: "keras.Model", state_only: bool = False) -> list[str]:
        """Returns the paths of variables that are not bit-equal on all replicas.

        The variables include seed states. If `state_only` is True, compares only non-trainable variables.
        """

    def gather_variables(self, model: "keras.Model") -> None:
        """Copies the current values of all variables to each process.

        This is needed if each process updates only some of the variables.
        """

    def read(self, model: "keras.Model", variables: list[Any], take: Callable[[Any], Any] | None) -> list[Any]:
        """Returns the result of `take` for the value of each variable. All processes must call this method together.

        Gathers sharded variables one at a time. If `take` is None, this process takes part in the gathering, and
        ignores the result.
        """
        self.gather_variables(model)
        return [] if take is None else [take(variable) for variable in variables]

    def peak_memory_bytes(self) -> int:
        """Returns the peak memory in bytes: the maximum over the devices of this process.

        On the CPU, returns the peak memory of the process.
        """
        return peak_memory_of_process()
