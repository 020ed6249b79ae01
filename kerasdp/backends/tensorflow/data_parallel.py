"""Trains one replica on each TensorFlow device, from a single process, with `tf.distribute.MirroredStrategy`."""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.tensorflow import collectives, private
from kerasdp.backends.tensorflow.devices import (
    device_names,
    keep_on_device,
    put_on_device,
    take_rows,
)
from kerasdp.backends.tensorflow.train_step import (
    Graphs,
    ReplicaSteps,
    kind_of,
    own_shard,
    several,
)
from kerasdp.config import Config
from kerasdp.contract import DeviceBatch, SingleProcess, StepFunctions, Strategy, Structure, T, Trained
from kerasdp.data.sampling import CachedRows, Split
from kerasdp.errors import UserError
from kerasdp.keras_compat.patches import replaced
from kerasdp.processes.devices import Devices
from kerasdp.run_state import Detail, RunState
from kerasdp.step.replica import TrainedWeights, all_variables, compared_variables

if TYPE_CHECKING:
    import keras

    from kerasdp.data.batch import Batch


class DataParallel(Strategy):
    """Trains one replica of the model on each device. Implements `kerasdp.contract.Strategy`.

    Attributes:
        device_names: TensorFlow's names of the devices.
    """

    def __init__(self, devices: Devices, config: Config):
        """Creates the mirrored strategy. Keras must not be imported yet."""
        self.processes = SingleProcess()
        self.device_names = device_names(devices)
        self.split = Split(devices.count)
        # One replica runs without a strategy: Keras turns XLA off under any.
        one = tf.distribute.get_strategy()
        self.mirrored = one if devices.count == 1 else private.mirrored_strategy(self.device_names)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Returns the context in which models are created. New variables are mirrored on all devices."""
        from kerasdp.keras_compat.models import numbers_of_mirrored_variables

        numbers_of_mirrored_variables()
        scope = self.mirrored.scope()
        scope.__enter__()
        reset = tf.compat.v1.reset_default_graph

        def reset_default_graph() -> None:
            """Resets TensorFlow's default graph, and then enters the strategy's scope again.

            `keras.utils.clear_session` calls this function. A reset of the graph also ends the strategy's scope.
            """
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
        """Splits a batch over the devices. Each field becomes a list with one shard per device."""
        import keras

        names, size = self.device_names, len(batch.own_indices) // self.split.num_replicas
        places = [slice(first, first + size) for first in range(0, len(batch.own_indices), size)]

        def each(data: Structure) -> list[Structure]:
            return [
                keras.tree.map_structure(lambda leaf, rows=rows: None if leaf is None else leaf[rows], data)
                for rows in places
            ]

        def put(data: Structure) -> list[Structure]:
            return [put_on_device(shard, name) for shard, name in zip(each(data), names)]

        def keep(arrays: Structure) -> list[Structure]:
            return [keep_on_device(arrays, name) for name in names]

        if isinstance(batch.inputs, CachedRows):
            inputs = [take_rows(*one) for one in zip(batch.inputs.kept.copies(keep), each(batch.inputs.numbers), names)]
        else:
            inputs = put(batch.inputs)
        return DeviceBatch(inputs, put(batch.targets), put(batch.sample_weight), batch.indices)

    def step_functions(self, model: "keras.Model", run_state: RunState) -> StepFunctions:
        """Makes train, test and predict functions that run on all replicas."""
        self._require_mirrored(model)
        steps = ReplicaSteps(self, model)
        test, predict = (
            self._function(model, self._on_all(steps, name, step))
            for name, step in (("test_step", steps.test), ("predict_step", steps.predict))
        )
        train_step = {
            detail: self._on_all(steps, "train_step", functools.partial(steps.train, detail)) for detail in Detail
        }
        train = {detail: self._function(model, step) for detail, step in train_step.items()}
        train_several = self._function(model, several(self.mirrored, train_step[Detail.NOTHING]))

        return StepFunctions(
            train=lambda batch, detail: Trained(*train[detail](batch)),
            train_several=lambda batches: Trained(*train_several(*batches)),
            test=test,
            predict=predict,
        )

    def _on_all(self, steps: ReplicaSteps, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs a step on all replicas.

        The step has the same result on all replicas, so the function returns the result of the first replica.

        Args:
            steps: the steps of the model.
            name: the name of the model's method that the step implements, such as `train_step`.
            step: the step of one replica.
        """

        def on_one(num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure) -> Any:
            return step(DeviceBatch(inputs, targets, sample_weight, range(num_rows)))

        def run(num_rows: int, data: Any) -> Any:
            with steps.around(name):
                outputs = self.mirrored.run(on_one, args=(num_rows, *data))
            return tf.nest.map_structure(lambda value: self.mirrored.experimental_local_results(value)[0], outputs)

        return run

    def each_replica(self, function: Callable[[], T], is_traced: bool = False) -> list[T]:
        """Calls a function in each replica. See `Strategy.each_replica`.

        Each replica has a thread, and only one of these threads runs at a time. If `is_traced` is True, the function is
        traced in a graph and not run, which takes seconds.
        """
        found: dict[int, T] = {}

        def run() -> None:
            found[collectives.rank()] = function()

        if is_traced:
            tf.function(lambda: self.mirrored.run(run), autograph=False).get_concrete_function()
        else:
            self.mirrored.run(run)
        return [found[rank] for rank in sorted(found)]

    def shard_steps(self, model: "keras.Model") -> ReplicaSteps:
        """Returns the `ReplicaSteps` of a model."""
        return ReplicaSteps(self, model)

    def _function(self, model: "keras.Model", run: Callable[..., Any]) -> Callable[..., Any]:
        """Turns a step of all replicas into a function of batches. The function passes each replica its shard.

        The function runs as a graph, unless the model runs eagerly.
        """
        graphs, weights = Graphs(), TrainedWeights(model)

        def function(*batches: DeviceBatch) -> Any:
            num_rows, data = len(batches[0].indices), [tuple(batch[:3]) for batch in batches]
            if model.jit_compile and self.split.num_replicas > 1:
                raise UserError("jit_compile=True needs one device on TensorFlow; leave it out, or use --gpus=1")

            def run_shards(*data: Any) -> Any:
                return run(num_rows, *(self.mirrored.run(own_shard, args=(shards,)) for shards in data))

            if model.run_eagerly:
                return run_shards(*data)
            # A graph for each batch size (two a run): with relaxed shapes, as Keras has it, the losses of single
            # outputs are averaged over batches instead of samples (Keras 3.15, CompileLoss.call).
            kind = kind_of([shards[0] for shards in data[0]])
            key = weights.key(), len(data), num_rows, self.split.micro_batch_rows, kind
            return graphs.run(key, run_shards, data, model.jit_compile or None)

        return function

    def _require_mirrored(self, model: "keras.Model") -> None:
        """Raises `UserError` if a variable of the model is not mirrored.

        A variable that is not mirrored has a single copy. Every replica would update this copy.
        """
        from kerasdp.keras_compat.layers import raw_value

        for variable in all_variables(model) if self.split.num_replicas > 1 else ():
            if not isinstance(raw_value(variable), tf.distribute.DistributedValues):
                raise UserError(
                    f"{variable.path} of {model.name} was made outside of runner.scope(), so it is on one device only; "
                    "create all layers, the optimizer and the metrics within this scope"
                )

    def peak_memory_bytes(self) -> int:
        """Returns the peak memory in bytes: the maximum over the GPUs, or on the CPU the peak of the process."""
        if not self.device_names[0].startswith("GPU"):
            return super().peak_memory_bytes()
        return max(tf.config.experimental.get_memory_info(name)["peak"] for name in self.device_names)

    def diverged_variables(self, model: "keras.Model", state_only: bool = False) -> list[str]:
        """Returns the paths of all variables, including seeds, that are not bit-equal on all replicas."""

        def digests(variable: "keras.Variable") -> set[bytes]:
            copies = self.mirrored.experimental_local_results(variable.value)
            return {hashlib.sha256(copy.numpy().tobytes()).digest() for copy in copies}

        several = compared_variables(model, state_only) if self.split.num_replicas > 1 else ()
        return [each.path for each in several if len(digests(each)) > 1]

    @contextlib.contextmanager
    def running(self, model: "keras.Model") -> Iterator[None]:
        """Returns the context in which `fit`, `evaluate` and `predict` run.

        Inside this context, every replica holds the metrics of the WHOLE batch, and reading a metric reads one copy.
        Outside of this context, in Keras' functions, each replica holds the metrics of its shard, and reading a metric
        sums the copies.
        """
        from kerasdp.keras_compat.optimizers import no_gradient_sum

        metrics = [variable.value for variable in model.metrics_variables]
        gradients = no_gradient_sum() if self.split.num_replicas > 1 else contextlib.nullcontext()
        with private.read_from_first_replica(metrics), gradients:
            yield
