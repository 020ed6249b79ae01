"""TensorFlow: runs a step of each replica on its shard of the global batch."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdp.backends.base import DeviceBatch, ShardPass, Structure, Tensor
from kerasdp.backends.steps import inputs_for, learning_rate
from kerasdp.backends.tensorflow import collectives, optimizer_update
from kerasdp.data.sampling import replica_rows
from kerasdp.portability.replica_context import ReplicaContext, use
from kerasdp.runtime.run_state import Detail

if TYPE_CHECKING:
    import keras


class ReplicaSteps:
    """Runs the steps of a model in each replica."""

    def __init__(self, strategy: Any, model: "keras.Model"):
        """Made once for each compiled model."""
        from kerasdp.keras_compat import own_steps
        from kerasdp.portability.activity_regularization import WholeBatchPenalties

        self.strategy, self.model = strategy, model
        self.own = own_steps(model)
        self.penalties = WholeBatchPenalties(model)

    def train(
        self, detail: Detail, num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure
    ) -> tuple[Any, ...]:
        """Trains on the global batch; returns its loss, learning rate, Keras' logs and what was observed."""
        from kerasdp.backends.observer import forward_pass, observed
        from kerasdp.portability.layers.batch_normalization import move_together, pack_moving

        model, strategy = self.model, self.strategy
        if "train_step" in self.own:
            logs, _ = self.own_step("train_step", num_rows, (inputs, targets, sample_weight))
            return logs.get("loss"), None, logs, {}
        with tf.GradientTape() as tape:
            with use(strategy.context(self.model, num_rows)) as context, forward_pass(detail, inputs) as recorded:
                outputs = self._forward(inputs, training=True)
            is_shard_loss = self._is_mean_over_shards(outputs, num_rows, context)
            if not is_shard_loss:
                outputs = outputs if context is None else context.whole_outputs(outputs)
            batch = (inputs, targets, outputs, sample_weight)
            loss = self._loss(batch, num_rows, context, training=True, is_shard_loss=is_shard_loss)
            scaled_loss = model.optimizer.scale_loss(loss)
        variables = model.trainable_weights
        gradients = optimizer_update.dense(tape.gradient(scaled_loss, variables))
        if context is not None:
            # In one collective with the gradients: what each replica has a share of.
            shared = {"loss": loss / strategy.num_replicas}
            if context.moving:
                shared["moving"] = pack_moving(context.moving)
            if is_shard_loss:
                shared["outputs"] = collectives.zero_pad_to_global_batch(outputs)
            gradients, sums = collectives.mean(gradients, shared, strategy.gradient_precision)
            loss, outputs = sums["loss"], sums.get("outputs", outputs)
        observed_values, rate = observed(detail, gradients, recorded), learning_rate(model.optimizer)

        def update() -> None:
            if context is not None and context.moving:
                move_together(context.moving, sums["moving"])
            if variables:
                model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

        if optimizer_update.can_be_one(model):
            optimizer_update.as_one(model, update)
        else:
            update()
        return loss, rate, self._metrics((inputs, targets, outputs, sample_weight), loss, num_rows), observed_values

    @contextlib.contextmanager
    def on_several_devices(self, name: str) -> Iterator[None]:
        """Returns the context around the step of that name on all replicas, which are traced within, in turns."""
        from kerasdp.keras_compat import losses_by_thread
        from kerasdp.portability.own_steps import joined_steps
        from kerasdp.portability.row_search import row_axes_of

        adding = row_axes_of(self.model).adding.values()
        if self.strategy.num_replicas == 1:
            yield
        elif name in self.own:
            with joined_steps(self.model):
                yield
        else:
            with_losses = [*self.penalties.regularized, *(each.layer for each in adding)]
            with self.penalties.active(adding), losses_by_thread(with_losses):
                yield

    def own_step(self, name: str, num_rows: int, batch: tuple[Any, ...], is_trial: bool = False) -> tuple[Any, Any]:
        """Runs a user-defined step; returns Keras' logs and what a trial found, for the global batch."""
        from kerasdp.keras_compat import as_keras_gives, losses_of_whole_batch
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
        outputs, context = self._whole_outputs(inputs, num_rows)
        batch = (inputs, targets, outputs, sample_weight)
        return self._metrics(batch, self._loss(batch, num_rows, context, training=False), num_rows)

    def predict(self, num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure) -> Any:
        """Computes the outputs of the global batch."""
        from kerasdp.keras_compat import as_keras_gives

        if "predict_step" in self.own:
            with use(self.strategy.context(self.model, num_rows, "predict_step")):
                outputs = self.model.predict_step(as_keras_gives((inputs, None, None)))
            return self.strategy.gather(outputs, num_rows)
        return self._whole_outputs(inputs, num_rows)[0]

    def shard_pass(self, num_rows: int, inputs: Structure, targets: Structure, sample_weight: Structure) -> Any:
        """Returns what each layer gives in a forward pass of training, the outputs and the loss of the global batch."""
        import keras

        from kerasdp.backends.observer import added_losses_by_name, shard_outputs
        from kerasdp.portability.row_search import fixed_values

        with keras.StatelessScope(fixed_values(self.model), collect_losses=True):
            with use(self.strategy.context(self.model, num_rows)) as context, shard_outputs() as layers:
                outputs = self._forward(inputs, training=True)
                outputs = outputs if context is None else context.whole_outputs(outputs)
            loss = self._loss((inputs, targets, outputs, sample_weight), num_rows, context, training=True)
            layers |= added_losses_by_name(self.model, len(layers))
        return layers, keras.tree.flatten(outputs), loss

    def _forward(self, inputs: Structure, training: bool) -> Structure:
        takes_training = "training" in self.model.call_signature_parameters
        return self.model(inputs, training=training) if takes_training else self.model(inputs)

    def _whole_outputs(self, inputs: Structure, num_rows: int) -> tuple[Structure, ReplicaContext | None]:
        """Computes the outputs of the global batch in inference, and the context in which they were computed."""
        with use(self.strategy.context(self.model, num_rows)) as context:
            outputs = self._forward(inputs, training=False)
            return outputs if context is None else context.whole_outputs(outputs), context

    def _is_mean_over_shards(self, outputs: Structure, num_rows: int, context: ReplicaContext | None) -> bool:
        from kerasdp.portability.loss_reduction import is_mean_over_shards

        if context is None or context.rows is None or context.rows * context.num_replicas != num_rows:
            return False
        is_by_rows = is_mean_over_shards(self.model, outputs) and context.is_by_rows(outputs)
        return is_by_rows and collectives.are_few(outputs)

    def _loss(
        self,
        batch: tuple[Any, ...],
        num_rows: int,
        context: ReplicaContext | None,
        training: bool,
        is_shard_loss: bool = False,
    ) -> Any:
        """Computes the loss of the global batch, or of this replica's shard; the mean of the latter is the former."""
        import keras

        from kerasdp.keras_compat import compute_loss, losses_of_whole_batch
        from kerasdp.portability.random import portable_draws

        inputs, targets, outputs, sample_weight = batch
        if is_shard_loss and context is not None and context.rows is not None:
            own = slice(context.first_row, context.first_row + context.rows)
            targets, sample_weight = keras.tree.map_structure(
                lambda leaf: None if leaf is None else leaf[own], (targets, sample_weight)
            )
        inputs = inputs_for("compute_loss", self.model, inputs, lambda own: self.strategy.gather(own, num_rows))
        # The thread of a replica knows nothing of the context of the run.
        with losses_of_whole_batch(), portable_draws("a loss"):
            return compute_loss(self.model, inputs, targets, outputs, sample_weight, training=training)

    def _metrics(self, batch: tuple[Any, ...], loss: Tensor, num_rows: int) -> Any:
        from kerasdp.keras_compat import update_loss_metric

        inputs, targets, outputs, sample_weight = batch
        inputs = inputs_for("compute_metrics", self.model, inputs, lambda own: self.strategy.gather(own, num_rows))
        update_loss_metric(self.model, loss, num_rows)
        return self.model.compute_metrics(inputs, targets, outputs, sample_weight=sample_weight)


def shard_passes(strategy: Any, model: "keras.Model", batch: DeviceBatch) -> list[ShardPass]:
    """Runs a forward pass of training on each replica; no variable changes. Eager: a graph would take seconds."""
    from kerasdp.backends.observer import watched_layers
    from kerasdp.portability.row_search import row_axes_of

    steps, num_rows = ReplicaSteps(strategy, model), len(batch.indices)
    rows = replica_rows(num_rows, strategy.num_replicas)

    def run(*data: Any) -> Any:
        return steps.shard_pass(num_rows, *(field[collectives.rank()] for field in data))

    adding = row_axes_of(model).adding.values()
    with steps.penalties.active(adding), watched_layers(Detail.EVERYTHING, model):
        results = strategy.mirrored.run(run, args=tuple(batch[:3]))
    passes = []
    for rank in range(strategy.num_replicas):
        layers, outputs, loss = tf.nest.map_structure(
            lambda value, rank=rank: strategy.mirrored.experimental_local_results(value)[rank], results
        )
        first = rank * rows
        passes.append(ShardPass(layers, outputs, loss, first, min(max(num_rows - first, 0), rows), rows))
    return passes


def try_own_step(strategy: Any, model: "keras.Model", batch: DeviceBatch) -> list[tuple[str, Any]]:
    """Runs a model's own `train_step` on each replica's rows, without an update; returns what it found. Eager."""
    steps, found = ReplicaSteps(strategy, model), []

    def run(*data: Any) -> None:
        own = tuple(field[collectives.rank()] for field in data)
        found.append(steps.own_step("train_step", len(batch.indices), own, is_trial=True)[1])

    strategy.mirrored.run(run, args=tuple(batch[:3]))
    return found[0]
