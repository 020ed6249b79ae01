"""TensorFlow: trains a replica on each device, driven by one process, with `tf.distribute.MirroredStrategy`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, ShardPass, StepFunctions, Strategy, Structure, Trained, processes_of
from kerasdp.backends.steps import TrainedWeights, all_variables
from kerasdp.backends.tensorflow import collectives, private
from kerasdp.backends.tensorflow.batch_shards import shard_batch
from kerasdp.backends.tensorflow.devices import (
    device_names,
    differing_variables,
    give_back_memory,
    mirrored_strategy,
    peak_memory_by_device,
    require_deterministic,
)
from kerasdp.backends.tensorflow.train_step import several
from kerasdp.config import Config
from kerasdp.config.validation import VIRTUAL
from kerasdp.data.sampling import Split
from kerasdp.errors import UserError
from kerasdp.keras_compat.patches import replaced
from kerasdp.portability.replica_context import ReplicaContext, gather_shards
from kerasdp.runtime.devices import Devices
from kerasdp.runtime.run_state import Detail, RunState

if TYPE_CHECKING:
    import keras

    from kerasdp.backends.tensorflow.train_step import ReplicaSteps
    from kerasdp.data.batch import Batch


class DataParallel(Strategy):
    """A replica of the model on each device. See `kerasdp.backends.base.Strategy`."""

    takes_several_steps = True

    def __init__(self, devices: Devices, config: Config):
        """Makes the strategy. Call before Keras is imported."""
        self.processes = processes_of(devices)
        self.shard = self.processes.rank, self.processes.num_processes
        self.num_devices = self.num_replicas = devices.count
        self.splits_batches = devices.count > 1
        self.split = Split(devices.count, config.shares)
        self.gradient_precision = config.gradient_precision
        self.must_be_deterministic = config.deterministic and devices.is_accelerator
        collectives.require_sum(config.gradient_precision, devices)
        self.device_names = device_names(devices)
        # One replica runs without a strategy: Keras turns XLA off under any.
        one = tf.distribute.get_strategy()
        self.mirrored = (
            one if devices.count == 1 else mirrored_strategy(self.device_names, self.processes, config.reduce)
        )
        self.reduce = config.reduce

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are made: their variables are mirrored on all devices."""
        scope = self.mirrored.scope()
        scope.__enter__()
        reset = tf.compat.v1.reset_default_graph

        def reset_default_graph() -> None:
            """Enters the scope again: `keras.utils.clear_session` takes it away with TensorFlow's graph."""
            nonlocal scope
            reset()
            scope = self.mirrored.scope()
            scope.__enter__()

        try:
            with replaced(tf.compat.v1, reset_default_graph=reset_default_graph):
                yield
        finally:
            scope.__exit__(None, None, None)

    def shard_batch(self, batch: "Batch") -> DeviceBatch:
        """Splits a batch over the devices: lists with an entry a device."""
        return shard_batch(self, batch)

    def gather(self, outputs: Structure, num_rows: int) -> Structure:
        """Gathers the rows of all replicas, without padding; axis 0 may hold several entries for each row.

        Its gradient is made so that the MEAN over the replicas of the gradients of a weight is the gradient of
        the loss of the global batch, whatever that loss is.
        """
        if self.num_replicas == 1:
            return outputs
        replicas = self.split.replicas(num_rows)
        own = replicas[collectives.rank()]

        def gather(rows: tf.Tensor) -> tf.Tensor:
            whole = gather_shards(collectives.sendable(rows), own, replicas, collectives.gather_rows)
            # The gathered tensor has lost its number of rows, which Keras' metrics ask for.
            return tf.ensure_shape(
                tf.cast(whole, rows.dtype), (num_rows * (rows.shape[0] // own.size), *rows.shape[1:])
            )

        return tf.nest.map_structure(gather, outputs)

    def context(self, model: "keras.Model", num_rows: int, step: str = "call") -> ReplicaContext | None:
        """Returns the context of a step of a model on a global batch of `num_rows` rows; `step`: see `row_axes_of`."""
        from kerasdp.portability.row_search import context_of

        if self.num_replicas == 1:
            return None
        gather, place = collectives.gather_statistics, (collectives.rank(), self.split.replicas(num_rows))
        return context_of(model, step, *place, gather=gather, gather_rows=lambda rows: self.gather(rows, num_rows))

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that run on all replicas."""
        from kerasdp.backends.tensorflow.train_step import ReplicaSteps

        steps = ReplicaSteps(self, model)
        test, predict = (
            self._function(model, self._on_all(model, steps, name, step))
            for name, step in (("test_step", steps.test), ("predict_step", steps.predict))
        )
        train_step = {
            detail: self._on_all(model, steps, "train_step", functools.partial(steps.train, detail), detail)
            for detail in Detail
        }
        train = {detail: self._function(model, step) for detail, step in train_step.items()}
        train_several = self._function(model, several(self.mirrored, train_step[Detail.NOTHING]))
        return StepFunctions(
            train=lambda batch, detail: Trained(*train[detail](batch)),
            train_several=lambda batches: Trained(*train_several(*batches)),
            test=test,
            predict=predict,
        )

    def _on_all(
        self,
        model: "keras.Model",
        steps: "ReplicaSteps",
        name: str,
        step: Callable[..., Any],
        detail: Detail = Detail.NOTHING,
    ) -> Callable[..., Any]:
        """Runs the step on all replicas, and returns what the first one returned: it is the same on all.

        `name`: of the model's method that it stands for.
        """

        def run(num_rows: int, data: Any) -> Any:
            with steps.on_several_devices(name):
                outputs = self.mirrored.run(step, args=(num_rows, *data))
            return tf.nest.map_structure(lambda value: self.mirrored.experimental_local_results(value)[0], outputs)

        return run

    def in_replicas(self, function: Callable[[], None]) -> None:
        """Calls a function in each replica, in a thread of its own, one at a time."""
        self.mirrored.run(function)

    def try_own_step(self, model: "keras.Model", batch: DeviceBatch) -> list[tuple[str, Any]]:
        """Runs the model's own `train_step` on each replica's rows, without an update; returns what it found."""
        from kerasdp.backends.tensorflow.train_step import try_own_step

        return try_own_step(self, model, batch)

    def pass_seconds(self, model: "keras.Model", batch: DeviceBatch) -> list[float]:
        """Returns the seconds of a forward and a backward pass on each replica, one after the other."""
        from kerasdp.backends.tensorflow.train_step import pass_seconds

        return [pass_seconds(self, model, batch, rank) for rank in range(len(self.device_names))]

    def description(self, model: "keras.Model") -> str:
        """Returns where gradients are added, if that was chosen."""
        if self.reduce is None:
            return ""
        if self.device_names[0].startswith("CPU"):
            way = (
                "the first of them adds the gradients" if self.reduce == "host" else "they add the gradients in a ring"
            )
            return f"--reduce={self.reduce}: {VIRTUAL}; {way}"
        return "gradients are added " + ("in host memory" if self.reduce == "host" else "on the GPUs")

    def build_optimizer(self, optimizer: "keras.optimizers.Optimizer", variables: list[Any]) -> None:
        """Builds an optimizer from within a replica, once for all."""

        def build(_: Any) -> None:
            if not optimizer.built:
                optimizer.build(variables)

        tf.distribute.get_replica_context().merge_call(build)

    def shard_passes(self, model: "keras.Model", batch: DeviceBatch) -> list[ShardPass]:
        """Runs a forward pass of training on each replica; no variable changes."""
        from kerasdp.backends.tensorflow.train_step import shard_passes

        return shard_passes(self, model, batch)

    def _function(self, model: "keras.Model", run: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `run` on batches, each replica with its shard: as a graph, unless the model runs eagerly."""
        graphs, weights = {}, TrainedWeights(model)

        def function(*batches: DeviceBatch) -> Any:
            num_rows, data = len(batches[0].indices), [tuple(batch[:3]) for batch in batches]
            if model.jit_compile and self.num_replicas > 1:
                raise UserError("jit_compile=True: TensorFlow takes one device for it; leave it out, or use --gpus=1")

            def run_shards(*data: Any) -> Any:
                return run(num_rows, *(self.mirrored.run(_own_shard, args=(shards,)) for shards in data))

            if model.run_eagerly:
                return run_shards(*data)
            # A graph for each batch size (two a run): with relaxed shapes, as Keras has it, the losses of single
            # outputs are averaged over batches instead of samples (Keras 3.15, CompileLoss.call).
            first = tf.nest.flatten([shards[0] for shards in data[0]])
            key = weights.key(), len(data), num_rows, self.split.shares
            key += tuple((leaf.shape, leaf.dtype) for leaf in first if leaf is not None)
            if key not in graphs:
                graph = tf.function(run_shards, jit_compile=model.jit_compile or None, autograph=False)
                # Looking it up in each step takes TensorFlow (2.21) a millisecond on four devices.
                graphs[key] = graph.get_concrete_function(*data)
                if self.must_be_deterministic:
                    require_deterministic(graphs[key].graph)
                results = graphs[key](*data)
                give_back_memory()
                return results
            return graphs[key](*data)

        return function

    def variables_outside_scope(self, model: "keras.Model") -> list[str]:
        """Returns the paths of the variables that are not mirrored; each replica would change them once more."""
        if self.num_replicas == 1:
            return []
        kind = tf.distribute.DistributedValues
        return [variable.path for variable in all_variables(model) if not isinstance(variable.value, kind)]

    def diverged_variables(self, model: "keras.Model") -> list[str]:
        """Returns the paths of variables, seeds included, that are not bit-equal on all replicas."""
        return differing_variables(model.variables, self.mirrored, self.processes)

    @contextlib.contextmanager
    def running(self, model: "keras.Model") -> Iterator[None]:
        """Returns the context of `fit`, `evaluate` and `predict`.

        Here every replica keeps metrics of the WHOLE batch, so reading one means reading one copy. Outside, in Keras'
        own functions, each keeps those of its shard, and reading one sums them.
        """
        from kerasdp.keras_compat.optimizers import no_gradient_sum

        metrics = [variable.value for variable in model.metrics_variables]
        gradients = no_gradient_sum() if self.num_replicas > 1 else contextlib.nullcontext()
        with private.read_from_first_replica(metrics), gradients:
            yield

    def peak_memory_by_device(self) -> list[int]:
        """Returns the most bytes that each device has used; nothing if they share one process."""
        return peak_memory_by_device(self.device_names)


def _own_shard(shards: tuple[list[Structure], ...]) -> tuple[Structure, ...]:
    """Returns the shard of a batch for the replica that is being traced."""
    return tuple(field[collectives.local_rank()] for field in shards)
