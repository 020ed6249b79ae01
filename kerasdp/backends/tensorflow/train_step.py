"""Runs the steps of each TensorFlow replica on its shard of the global batch."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.tensorflow import collectives, private, xla
from kerasdp.backends.tensorflow.gradients import dense
from kerasdp.backends.tensorflow.xla import compiled_on_gpus
from kerasdp.contract import DeviceBatch, Structure, Tensor
from kerasdp.data.sampling import ReplicaRows
from kerasdp.errors import UserError
from kerasdp.processes.hardware import give_memory_back
from kerasdp.run_state import Detail
from kerasdp.same.replica_context import gather_shards
from kerasdp.step.fit_step import fit_step
from kerasdp.step.replica import Found, Gradients, LossOfPass, Pass, Received, ShardSteps, all_variables

if TYPE_CHECKING:
    from kerasdp.step.global_batch import GlobalBatch


class ReplicaSteps(ShardSteps):
    """Runs the steps of a model on one replica's shard. The same object is traced for each replica."""

    def train(self, detail: Detail, batch: DeviceBatch) -> tuple[Any, ...]:
        """Runs one training step on the global batch.

        Args:
            detail: how much the step records.
            batch: this replica's shard, with padding.

        Returns:
            The loss, the learning rate, Keras' logs and the recorded values.
        """
        if "train_step" in self.own:
            logs, _ = self.own_step("train_step", batch)
            return logs.get("loss"), None, logs, {}
        # For each number of rows in a micro-batch: the function that differentiates it, and its last result.
        self._functions: dict[int, Any] = {}
        self._global_batches: dict[int, GlobalBatch] = {}
        return tuple(fit_step(self, batch, detail))

    def differentiate(self, compute: LossOfPass, one: Pass) -> tuple[list[Tensor | None], "GlobalBatch", Found]:
        """Computes the gradients of one pass. In a graph, micro-batches of the same size share one function."""
        # Several replicas cannot meet within a function.
        if one.total_rows is not None and self.strategy.split.num_replicas == 1 and not tf.executing_eagerly():
            return self._by_call(compute, one)
        with tf.GradientTape() as tape:
            loss, global_batch, found = compute(one)
        return dense(tape.gradient(loss, self.model.trainable_weights)), global_batch, found

    def _by_call(self, compute: LossOfPass, one: Pass) -> tuple[list[Tensor | None], "GlobalBatch", Found]:
        """Computes the gradients of a micro-batch with a function that TensorFlow does not inline into the graph."""
        (own,), num_rows = one.replicas, len(one.batch.indices)

        def differentiate(data: Structure, first_row: Tensor) -> tuple[list[Any], Any]:
            with tf.GradientTape() as tape:
                batch = DeviceBatch(data[0], data[1], data[2], one.batch.indices)
                replicas = (own._replace(first=first_row),)
                loss, self._global_batches[num_rows], _ = compute(one._replace(batch=batch, replicas=replicas))
            return dense(tape.gradient(loss, self.model.trainable_weights)), self._global_batches[num_rows].sums

        if num_rows not in self._functions:
            attributes = {"_noinline": True}
            self._functions[num_rows] = tf.function(differentiate, autograph=False, experimental_attributes=attributes)
        # Not a Python number: TensorFlow (2.21) makes a copy of a function for each that it is called with.
        gradients, sums = self._functions[num_rows](tuple(one.batch[:3]), tf.convert_to_tensor(own.first))
        global_batch = self._global_batches[num_rows]
        global_batch.sums = sums
        return gradients, global_batch, {}

    def wait_for(self, gradients: Gradients, one: Pass) -> Pass:
        """Makes a pass start only after the given gradients are computed.

        Otherwise TensorFlow would run all forward passes first, and keep all of their activations.
        """
        with tf.control_dependencies([each for each in gradients if each is not None]):
            data = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), tuple(one.batch[:3]))
        return one._replace(batch=DeviceBatch(data[0], data[1], data[2], one.batch.indices))

    def all_reduce(self, gradients: Gradients, to_reduce: dict[str, Tensor]) -> Callable[[], Received]:
        """Averages gradients over the replicas, and sums `to_reduce` over the replicas in the same collectives."""
        from kerasdp.keras_compat.layers import is_next_value

        if self.strategy.split.num_replicas == 1:
            return lambda: (gradients, to_reduce)
        weights = self.model.trainable_weights
        next_values = self.next_values(gradients, weights)
        averaged = [None if is_next_value(weight) else each for each, weight in zip(gradients, weights)]
        received = collectives.mean(averaged, to_reduce)

        def take_apart() -> Received:
            means, sums = received()
            return self.with_next_values(means, next_values), sums

        # On GPUs the compiled update calls it again, so that its results are not stored. Elsewhere one call is enough.
        return take_apart if xla.has_gpus() else functools.cache(take_apart)

    def update(self, update: Callable[[], None]) -> None:
        """Runs the optimizer's update. If possible, one call updates all weights within the replica context."""
        from kerasdp.keras_compat.optimizers import has_branches

        model = self.model
        if can_update_at_once(model.optimizer, model.trainable_weights):
            update_at_once(model.optimizer, all_variables(model), update)
        elif self.strategy.split.num_replicas > 1 and has_branches(model.optimizer) and not tf.executing_eagerly():
            # Keras (3.15) leaves the replica context within one of two branches. TensorFlow has no graph for this.
            raise UserError(
                f"{type(model.optimizer).__name__} cannot use gradient_accumulation_steps or ema_overwrite_frequency "
                "on TensorFlow with several devices; leave them out and use --accumulate, or use --gpus=1"
            )
        else:
            update()

    @contextlib.contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Returns the context in which TensorFlow traces a step of all replicas, one replica after the other.

        Args:
            name: the name of the step, such as `train_step`.
        """
        from kerasdp.keras_compat.layers import all_layers
        from kerasdp.keras_compat.models import losses_by_thread
        from kerasdp.step.custom_steps import join_steps

        with contextlib.ExitStack() as stack:
            if name in self.own:
                stack.enter_context(updating_at_once())
                if self.strategy.split.num_replicas > 1:
                    stack.enter_context(join_steps(self.model))
            elif self.strategy.split.num_replicas > 1:
                stack.enter_context(losses_by_thread(all_layers(self.model)))
            yield

    def shard_of(self, batch: DeviceBatch) -> DeviceBatch:
        """Returns the shard of the replica that is being traced, from a batch with the shards of all replicas."""
        inputs, targets, sample_weight = own_shard(batch[:3])
        return DeviceBatch(inputs, targets, sample_weight, batch.indices)

    def build_optimizer(self, optimizer: Any, variables: list[Any]) -> None:
        """Builds an optimizer once for all replicas."""

        def build(_: Any) -> None:
            if not optimizer.built:
                optimizer.build(variables)

        tf.distribute.get_replica_context().merge_call(build)

    def own_step(self, name: str, batch: DeviceBatch, is_trial: bool = False) -> tuple[Any, Any]:
        """Runs a user-defined step on this replica's shard.

        Args:
            name: the name of the step method, such as `train_step`.
            batch: this replica's shard.
            is_trial: whether the step is a trial, in which no optimizer changes anything.

        Returns:
            Keras' logs, and the records of a trial. See `kerasdp.step.custom_steps.Share` for these records. The list
            of records is empty if `is_trial` is False.
        """
        from kerasdp.keras_compat.models import as_keras_gives, losses_of_whole_batch
        from kerasdp.step.custom_steps import run_on_shard

        model, context = self.model, self.context(batch, name)
        if context is None:
            return getattr(model, name)(as_keras_gives(batch[:3])), []
        with losses_of_whole_batch():
            return run_on_shard(model, name, batch[:3], context, collectives.sums, self.build_optimizer, is_trial)

    def rank(self) -> int:
        """Returns the rank of this replica."""
        return collectives.rank()

    def largest(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the elementwise maximum of each tensor over the replicas. An entry that is None stays None."""
        own = [tensor for tensor in tensors if tensor is not None]
        if not own:
            return tensors
        flat = tf.concat([tf.reshape(tf.cast(tensor, tf.float64), [-1]) for tensor in own], 0)
        joined = tf.reduce_max(collectives.gather_statistics(flat), 0)
        found = iter(tf.split(joined, [tensor.shape.num_elements() for tensor in own]))
        return [
            None if tensor is None else tf.cast(tf.reshape(next(found), tensor.shape), tensor.dtype)
            for tensor in tensors
        ]

    def gather_statistics(self, statistics: Tensor, weight: float = 1.0) -> Tensor:
        """Stacks the batch norm statistics of all replicas. See `ReplicaContext.gather`."""
        return collectives.gather_statistics(statistics, weight)

    def gather_shards(self, rows: Tensor, own: ReplicaRows, replicas: tuple[ReplicaRows, ...]) -> Tensor:
        """Gathers the rows of all replicas, without padding. See `ShardSteps.gather_shards`."""
        whole = tf.cast(gather_shards(collectives.sendable(rows), own, replicas, collectives.gather_rows), rows.dtype)
        # The gathered tensor has lost its number of rows, which Keras' metrics ask for.
        num_rows = sum(each.num_rows for each in replicas) * (rows.shape[0] // own.size)
        return tf.ensure_shape(whole, (num_rows, *rows.shape[1:]))

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the replicas."""
        return collectives.sums([tensor])[0]

    def sums(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums tensors over the replicas, with one collective per dtype."""
        return collectives.mean([], tensors)()[1] if tensors else {}


def own_shard(shards: tuple[list[Structure], ...]) -> tuple[Structure, ...]:
    """Returns the shard of the replica that is being traced.

    Args:
        shards: the fields of a batch. Each field is a list with one shard per replica.
    """
    return tuple(field[collectives.rank()] for field in shards)


def updating_at_once() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the optimizers of a user-defined step use `update_at_once` where possible.

    The optimizers get dense gradients.
    """
    from kerasdp.keras_compat.layers import is_in_scope
    from kerasdp.keras_compat.optimizers import weights_of_optimizer, wrapped_apply

    def apply_at_once(
        apply: Callable[..., None], optimizer: Any, grads: Iterable[Any], trainable_variables: Any = None
    ) -> None:
        gradients = dense(list(grads))
        weights = None if trainable_variables is None else list(trainable_variables)
        known = weights_of_optimizer(optimizer) if optimizer.built else []
        # A LossScaleOptimizer calls its inner optimizer while it is updated at once, or outside of the replicas.
        is_within = is_in_scope() or tf.distribute.in_cross_replica_context()
        if not known or is_within or not can_update_at_once(optimizer, known):
            return apply(optimizer, gradients, weights)
        return update_at_once(optimizer, [*optimizer.variables, *known], lambda: apply(optimizer, gradients, weights))

    return wrapped_apply(apply_at_once)


def update_at_once(optimizer: Any, variables: list[Any], update: Callable[[], None]) -> None:
    """Runs `update` on this replica's copies of the variables. On GPUs, the update is one compiled operation.

    Without this function, Keras' optimizer (3.15) leaves the replica context once for each weight. XLA cannot compile
    an update that leaves this context.

    Args:
        optimizer: the optimizer that `update` calls.
        variables: the variables that `update` may change.
        update: a function that assigns new values to the variables.
    """
    import keras

    from kerasdp.keras_compat import optimizers
    from kerasdp.keras_compat.layers import raw_values

    def compute() -> None:
        # Of a mirrored variable this is, within a replica, the handle of that replica's copy: XLA takes no other.
        held = raw_values(variables)
        handles = [each.handle for each in held]
        read = [tf.raw_ops.ReadVariableOp(resource=each.handle, dtype=each.dtype) for each in held]
        values = [tf.ensure_shape(value, each.shape) for value, each in zip(read, held)]
        with (
            optimizers.deciding_on_device(optimizer),
            optimizers.updating_values(optimizers.inner_optimizer(optimizer)),
            keras.StatelessScope(list(zip(variables, values))) as scope,
        ):
            update()
        for variable, handle, value in zip(variables, handles, values, strict=True):
            new = scope.get_current_value(variable)
            if new is not value:
                tf.raw_ops.AssignVariableOp(resource=handle, value=new)

    compiled_on_gpus(compute)()


def can_update_at_once(optimizer: Any, weights: list[Any]) -> bool:
    """Returns whether `update_at_once` can update the given weights in the current step.

    The step must run as a graph. The optimizer, its learning rate schedule and the constraints of the weights must be
    Keras classes. The optimizer must not override the methods that `update_at_once` replaces. For example, it must not
    be Nadam, which overrides one of these methods.
    """
    from kerasdp.keras_compat import optimizers
    from kerasdp.keras_compat.layers import is_of_keras

    inner = optimizers.inner_optimizer(optimizer)
    parts = [optimizer, inner, optimizers.learning_rate_schedule(inner), *(weight.constraint for weight in weights)]
    are_of_keras = all(part is None or is_of_keras(type(part)) for part in parts)
    return are_of_keras and optimizers.overrides_nothing_of_tensorflow(inner) and not tf.executing_eagerly()


def several(mirrored: tf.distribute.Strategy, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that trains on several batches of the same shape.

    The function returns the losses and learning rates of all steps, and the logs of the last step.
    """

    def run(num_rows: int, *batches: Any) -> tuple[Any, ...]:
        rest = mirrored.run(_stacked, args=batches[1:])
        loss, rate, logs, _ = step(num_rows, batches[0])
        # A user-defined step may return no loss, and returns no rate. A loop cannot hold None.
        found = [value for value in (loss, rate) if value is not None]
        arrays = [tf.TensorArray(value.dtype, len(batches)).write(0, value) for value in found]

        def body(number: tf.Tensor, arrays: list[Any], logs: Any) -> tuple[Any, ...]:
            *values, logs, _ = step(num_rows, mirrored.run(_row, args=(rest, number - 1)))
            values = [value for value in values if value is not None]
            arrays = [array.write(number, value) for array, value in zip(arrays, values)]
            return number + 1, arrays, logs

        _, arrays, logs = tf.while_loop(
            lambda number, *_: number < len(batches), body, (tf.constant(1), arrays, logs), parallel_iterations=1
        )
        stacked = iter([array.stack() for array in arrays])
        losses, rates = (None if value is None else next(stacked) for value in (loss, rate))
        return losses, rates, logs, {}

    return run


def _stacked(*batches: Structure) -> Structure:
    # Not `tf.stack`: it has no kernel on GPUs (2.21) for uint8, the type of images.
    def stack(*leaves: Any) -> Any:
        return None if leaves[0] is None else tf.concat([leaf[tf.newaxis] for leaf in leaves], 0)

    return tf.nest.map_structure(stack, *batches)


def _row(stacked: Structure, number: tf.Tensor) -> Structure:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[number], stacked)


class Graphs:
    """Holds the graphs of a step, one for each kind of batch."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Any] = {}

    def run(self, key: Hashable, step: Callable[..., Any], data: Sequence[Any], jit_compile: bool | None) -> Any:
        """Runs the graph for one kind of batch. The first call for this kind traces `step`.

        Args:
            key: identifies the kind of batch.
            step: the function to trace.
            data: the arguments of `step`.
            jit_compile: whether XLA compiles the graph. None: TensorFlow chooses.
        """
        leaves = tf.nest.flatten(data)
        tensors = [leaf for leaf in leaves if leaf is not None]
        if key in self._graphs:
            return private.call_flat(self._graphs[key], tensors)
        structure, is_there = tf.nest.map_structure(lambda leaf: None, data), [leaf is not None for leaf in leaves]

        def run_flat(*tensors: tf.Tensor) -> Any:
            given = iter(tensors)
            return step(*tf.nest.pack_sequence_as(structure, [next(given) if each else None for each in is_there]))

        graph = tf.function(run_flat, jit_compile=jit_compile, autograph=False)
        # Looking it up in each step takes TensorFlow (2.21) a millisecond on four devices.
        self._graphs[key] = graph.get_concrete_function(*tensors)
        private.forget_gradients(self._graphs[key].graph)
        results = private.call_flat(self._graphs[key], tensors)
        # XLA compiles the optimizer's update for each device. For 360,000 weights on two devices it leaves 170 MiB.
        give_memory_back()
        return results


def kind_of(data: Structure) -> Hashable:
    """Returns the shape and dtype of each leaf of a structure. A leaf that is None stays None."""
    return tuple(None if leaf is None else (leaf.shape, leaf.dtype) for leaf in tf.nest.flatten(data))
