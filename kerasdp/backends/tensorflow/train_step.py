"""TensorFlow: runs a step of each replica on its shard of the global batch."""

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, ShardPass, Structure, Tensor
from kerasdp.backends.steps import learning_rate
from kerasdp.backends.tensorflow import collectives, optimizer_update
from kerasdp.backends.tensorflow.optimizer_update import dense
from kerasdp.keras_compat.patches import wrapped
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.run_state import Detail

if TYPE_CHECKING:
    import keras

    from kerasdp.portability.global_batch import GlobalBatch


# Passes by which the speed of a device is found: those that compile or warm it up, and those that count.
_UNMEASURED, _MEASURED = 2, 5


class ReplicaSteps:
    """Runs the steps of a model in each replica."""

    def __init__(self, strategy: Any, model: "keras.Model"):
        """Made once for each compiled model."""
        from kerasdp.keras_compat.models import own_steps

        self.strategy, self.model = strategy, model
        self.own = own_steps(model)

    def train(
        self, detail: Detail, num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure
    ) -> tuple[Any, ...]:
        """Trains on the global batch; returns its loss, learning rate, Keras' logs and what was observed.

        The data is this replica's shard, with padding (1). The numbers are those of docs/internals/same-learning.md.
        """
        from kerasdp.backends.observer import forward_pass, observed

        model, strategy = self.model, self.strategy
        if "train_step" in self.own:
            logs, _ = self.own_step("train_step", num_rows, (inputs, targets, sample_weight))
            return logs.get("loss"), None, logs, {}
        with tf.GradientTape() as tape:
            # The forward pass on the shard; batch norms exchange their statistics (5), layers know their rows (6).
            with use(strategy.context(model, num_rows)) as context, forward_pass(detail, model, inputs) as recorded:
                outputs = self._forward(inputs, training=True)
            # The share of these rows in the loss of the global batch (2, 4, 7), and in its metrics (3).
            whole = self._global_batch((inputs, targets, outputs, sample_weight), num_rows, context, training=True)
            scaled_loss = model.optimizer.scale_loss(whole.loss)
        whole.share_metrics()
        # The backward pass, and the mean of the gradients over the replicas (2), in one message with the metrics (3).
        variables = model.trainable_weights
        gradients = optimizer_update.dense(tape.gradient(scaled_loss, variables))
        take_apart: Callable[[], tuple[list[Any], dict[str, Tensor]]] = lambda: (gradients, {})  # noqa: E731
        if context is not None:
            take_apart = collectives.mean(gradients, whole.shared, strategy.gradient_precision)
        means, sums = take_apart()
        observed_values, rate = observed(detail, means, recorded), learning_rate(model.optimizer)

        def update() -> None:
            means, sums = take_apart()  # once more, within what is compiled
            whole.take(sums)
            whole.move_statistics()  # (5)
            if variables:
                model.optimizer.apply_gradients(zip(means, variables, strict=True))

        # The update, the same on each replica; loss and metrics of the global batch (3).
        if optimizer_update.can_be_one(model):
            optimizer_update.as_one(model, update)
        else:
            update()
        loss = whole.take(sums)
        return loss, rate, whole.update_metrics(loss), observed_values

    def on_several_devices(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Returns the context around the step of that name on all replicas, which are traced within, in turns."""
        from kerasdp.keras_compat.layers import all_layers
        from kerasdp.keras_compat.models import losses_by_thread
        from kerasdp.portability.own_steps import join_steps

        if self.strategy.num_replicas == 1:
            return contextlib.nullcontext()
        return join_steps(self.model) if name in self.own else losses_by_thread(all_layers(self.model))

    def own_step(self, name: str, num_rows: int, batch: tuple[Any, ...], is_trial: bool = False) -> tuple[Any, Any]:
        """Runs a user-defined step; returns Keras' logs and what a trial found, for the global batch."""
        from kerasdp.keras_compat.models import as_keras_gives, losses_of_whole_batch
        from kerasdp.portability.own_steps import run_on_shard

        model, strategy = self.model, self.strategy
        context = strategy.context(model, num_rows, name)
        if context is None:
            with optimizer_update.taking_dense():
                return getattr(model, name)(as_keras_gives(batch)), []
        with losses_of_whole_batch():
            return run_on_shard(model, name, batch, context, collectives.sums, strategy.build_optimizer, is_trial)

    def test(self, num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure) -> Any:
        """Evaluates the global batch; returns Keras' logs."""
        if "test_step" in self.own:
            return self.own_step("test_step", num_rows, (inputs, targets, sample_weight))[0]
        with use(self.strategy.context(self.model, num_rows)) as context:
            outputs = self._forward(inputs, training=False)
        whole = self._global_batch((inputs, targets, outputs, sample_weight), num_rows, context, training=False)
        whole.share_metrics()
        sums = {} if context is None else collectives.mean([], whole.shared)()[1]
        return whole.update_metrics(whole.take(sums))

    def predict(self, num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure) -> Any:
        """Computes the outputs of the global batch."""
        from kerasdp.keras_compat.models import as_keras_gives

        if "predict_step" in self.own:
            with use(self.strategy.context(self.model, num_rows, "predict_step")):
                outputs = self.model.predict_step(as_keras_gives((inputs, None, None)))
            return self.strategy.gather(outputs, num_rows)
        with use(self.strategy.context(self.model, num_rows)) as context:
            outputs = self._forward(inputs, training=False)
            return outputs if context is None else context.whole_outputs(outputs)

    def shard_pass(self, num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure) -> Any:
        """Returns what each layer gives in a forward pass of training, the outputs and the loss of the global batch."""
        import keras

        from kerasdp.backends.observer import shard_outputs
        from kerasdp.portability.row_search import fixed_values

        with keras.StatelessScope(fixed_values(self.model), collect_losses=True):
            with use(self.strategy.context(self.model, num_rows)) as context, shard_outputs(self.model) as layers:
                outputs = self._forward(inputs, training=True)
            whole = self._global_batch((inputs, targets, outputs, sample_weight), num_rows, context, training=True)
            loss = whole.take({} if context is None else collectives.mean([], whole.shared)()[1])
        return layers, [] if whole.is_of_own_rows else keras.tree.flatten(whole.whole().outputs), loss

    def _forward(self, inputs: Structure, training: bool) -> Structure:
        takes_training = "training" in self.model.call_signature_parameters
        return self.model(inputs, training=training) if takes_training else self.model(inputs)

    def _global_batch(
        self, data: tuple[Any, ...], num_rows: int, context: ReplicaContext | None, training: bool
    ) -> "GlobalBatch":
        """Computes the loss. `data`: of this replica: inputs, targets, outputs, sample weights."""
        from kerasdp.portability.global_batch import Data, GlobalBatch

        def add_up(number: Tensor) -> Tensor:
            return collectives.sums([number])[0]

        return GlobalBatch(self.model, context, Data(*data), num_rows, training=training, add_up=add_up)


def shard_passes(strategy: Any, model: "keras.Model", batch: DeviceBatch) -> list[ShardPass]:
    """Runs a forward pass of training on each replica; no variable changes. Eager: a graph would take seconds."""
    steps, num_rows = ReplicaSteps(strategy, model), len(batch.indices)
    num_local = len(strategy.device_names)
    first = strategy.processes.rank * num_local
    replicas = strategy.split.replicas(num_rows)[first : first + num_local]

    def run(*data: Any) -> Any:
        return steps.shard_pass(num_rows, *(field[collectives.local_rank()] for field in data))

    results = strategy.mirrored.run(run, args=tuple(batch[:3]))
    passes = []
    for rank, own in enumerate(replicas):
        layers, outputs, loss = tf.nest.map_structure(
            lambda value, rank=rank: strategy.mirrored.experimental_local_results(value)[rank], results
        )
        passes.append(ShardPass(layers, outputs, loss, *own))
    return passes


def pass_seconds(strategy: Any, model: "keras.Model", batch: DeviceBatch, rank: int) -> float:
    """Returns the seconds of a forward and a backward pass on one replica of this process, while the others wait."""
    import keras

    from kerasdp.keras_compat.models import compute_loss

    steps = ReplicaSteps(strategy, model)

    def run(*data: Any) -> Any:
        if collectives.local_rank() != rank:
            return tf.constant(0.0)
        inputs, targets, sample_weight = (field[rank] for field in data)
        with tf.GradientTape() as tape:
            values = [(variable, tf.convert_to_tensor(variable.value)) for variable in model.variables]
            with keras.StatelessScope(values, collect_losses=True):
                outputs = steps._forward(inputs, training=True)
                loss = compute_loss(model, inputs, targets, outputs, sample_weight, training=True)
        gradients = tape.gradient(loss, [weight.value for weight in model.trainable_weights])
        return tf.add_n([tf.reduce_sum(tf.abs(each)) for each in gradients if each is not None])

    def on_all() -> Any:
        return strategy.mirrored.run(run, args=tuple(batch[:3]))

    function, times = on_all if model.run_eagerly else tf.function(on_all, autograph=False), []
    for _ in range(_UNMEASURED + _MEASURED):
        begin = time.perf_counter()
        strategy.mirrored.experimental_local_results(function())[rank].numpy()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[_UNMEASURED:])


def try_own_step(strategy: Any, model: "keras.Model", batch: DeviceBatch) -> list[tuple[str, Any]]:
    """Runs a model's own `train_step` on each replica's rows, without an update; returns what it found. Eager."""
    steps, found = ReplicaSteps(strategy, model), []

    def run(*data: Any) -> None:
        own = tuple(field[collectives.local_rank()] for field in data)
        found.append(steps.own_step("train_step", len(batch.indices), own, is_trial=True)[1])

    strategy.mirrored.run(run, args=tuple(batch[:3]))
    return found[0]


def clipping_means(mean: Callable[[list[Any]], list[Any]]) -> contextlib.AbstractContextManager[None]:
    """Returns the context in which `tf.clip_by_global_norm` sees means; `mean`: as with torch."""

    def of_means(clip: Callable[..., Any], t_list: Any, *args: Any, **kwargs: Any) -> Any:
        return clip(mean(dense(list(t_list))), *args, **kwargs)

    return wrapped(tf, clip_by_global_norm=of_means)


def several(mirrored: tf.distribute.Strategy, step: Callable[..., Any]) -> Callable[..., Any]:
    """Trains on several batches of one shape; returns their losses and rates, and the last one's logs."""

    def run(num_rows: int, *batches: Any) -> tuple[Any, ...]:
        rest = mirrored.run(_stacked, args=batches[1:])
        loss, rate, logs, _ = step(num_rows, batches[0])
        # A user-defined step may give no loss, and gives no rate; a loop has no place for None.
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
    # Not `tf.stack`: for uint8, which images come in, it (2.21) has no kernel on GPUs.
    def stack(*leaves: Any) -> Any:
        return None if leaves[0] is None else tf.concat([leaf[tf.newaxis] for leaf in leaves], 0)

    return tf.nest.map_structure(stack, *batches)


def _row(stacked: Structure, number: tf.Tensor) -> Structure:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[number], stacked)
